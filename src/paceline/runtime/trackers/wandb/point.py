"""One point of a W&B sweep, for one trial: `python -m paceline.runtime.trackers.wandb.point SWEEP FILE`.

A process of its own, because wandb's agent changes the environment and leaves threads. What it was told is renamed
into FILE: the point, and the variables that make the trial's `wandb.init` the run that the sweep expects. A sweep
that has no more points leaves `{"point": null}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.run_folder import write_atomically
from paceline.runtime.trackers.wandb.agent import Point, each_point

ENTITY, PROJECT, RESUME = "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RESUME"


def main(words: Sequence[str]) -> int:
    sweep, file = words[0], Path(words[1])
    *before, _ = sweep.split("/")
    names = dict(zip((PROJECT, ENTITY), reversed(before), strict=False))
    names[RESUME] = "allow"  # a trial that is requeued goes on with its run

    def keep(point: Point) -> None:
        told = {"point": point.values, "variables": {**names, **point.variables}}
        write_atomically(file, json.dumps(told) + "\n")

    each_point(sweep, keep, count=1)
    if not file.exists():
        write_atomically(file, json.dumps({"point": None}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
