"""`python -m paceline.runtime.trackers.wandb_completing RUN`: what W&B lacks of a run that was killed.

Writes one more part of the W&B run, offline, from metrics.jsonl. `paceline sync` does it before it sends.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from paceline import contract
from paceline.runtime.trackers.connection import OFFLINE
from paceline.runtime.trackers.tracking import RunInfo, Tracking
from paceline.runtime.trackers.wandb_kept import KeptFiles
from paceline.runtime.trackers.wandb_run import WandbTracker, choose_id


def complete(folder: Path) -> bool:
    """Whether there was something to log."""
    run = contract.RunFolder(folder)
    order = contract.Order.from_json(run.order.read_text(encoding="utf-8"))
    tracking = replace(Tracking.of(order), wandb_mode=OFFLINE)
    size = run.metrics.stat().st_size if run.metrics.exists() else 0
    info = RunInfo(
        run_id=order.run_id, project=order.project, experiment=order.experiment, folder=folder, already=size,
        world=order.world_size, attempt=len(run.attempts()), params=dict(order.params),
    )  # fmt: skip
    kept = KeptFiles(folder, choose_id(info, {}))
    if tracking.wandb_all_processes or not kept.is_torn() or next(kept.lines(until=size), None) is None:
        return False
    tracker = WandbTracker(tracking)
    tracker.start(info)
    verdicts = [contract.read_verdict(attempt.verdict) for attempt in run.attempts()]
    tracker.finish((verdicts[-1] if verdicts else None) or contract.FAILED)
    return True


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
