"""`python -m paceline.runtime.trackers.wandb.completion RUN`: what W&B lacks of a run that was killed.

Writes one more part of the W&B run, offline, from metrics.jsonl. `paceline sync` does it before it sends.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import FAILED, read_verdict
from paceline.contract.wandb_server import OFFLINE
from paceline.runtime.trackers.base import RunInfo, Tracking
from paceline.runtime.trackers.wandb.offline import KeptFiles
from paceline.runtime.trackers.wandb.run import WandbTracker, choose_id


def complete(folder: Path) -> bool:
    """Whether there was something to log."""
    run = RunFolder(folder)
    launch_spec = LaunchSpec.from_json(run.launch_spec.read_text(encoding="utf-8"))
    tracking = replace(Tracking.of(launch_spec), wandb_mode=OFFLINE)
    size = run.metrics.stat().st_size if run.metrics.exists() else 0
    info = RunInfo(
        run_id=launch_spec.run_id,
        project=launch_spec.project,
        experiment=launch_spec.experiment,
        folder=folder,
        already=size,
        world_size=launch_spec.world_size,
        attempt=len(run.attempts()),
        params=dict(launch_spec.params),
    )
    kept = KeptFiles(folder, choose_id(info, {}))
    if tracking.wandb_all_processes or not kept.is_torn() or next(kept.lines(until=size), None) is None:
        return False
    tracker = WandbTracker(tracking)
    tracker.start(info)
    verdicts = [read_verdict(attempt.verdict) for attempt in run.attempts()]
    tracker.finish((verdicts[-1] if verdicts else None) or FAILED)
    return True


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
