"""Run folders as the runtime writes them, for pages to show."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract.run_folder import RunFolder

NOW = time.time()


def make_run(
    scratch: Path,
    run_id: str = "20260101-120000-aaaa",
    *,
    steps: int = 20,
    metric: str = "loss",
    log: Mapping[int, Sequence[str]] = {0: ("hello",), 1: ("world",)},
    verdict: str = "done",
    project: str = "digits",
    experiment: str = "first",
    **details: Any,
) -> RunFolder:
    """Make a local run that is over, with a metric that falls and a log of each rank."""
    folder = RunFolder(scratch / project / experiment / run_id)
    attempt = folder.attempt(1)
    shutil.rmtree(folder.path, ignore_errors=True)  # of a test that is repeated
    attempt.path.mkdir(parents=True)
    record = {
        "run_id": run_id,
        "project": project,
        "experiment": experiment,
        "name": "",
        "created": NOW,
        "program": "train.py",
        "command": ["paceline", "run", "train.py"],
        "nodes": 1,
        "nproc": len(log),
    }
    folder.run_json.write_text(json.dumps({**record, **details}))
    write_metrics(folder, range(steps), metric)
    for rank, lines in log.items():
        attempt.log(rank).write_text("".join(f"{line}\n" for line in lines))
    return folder


def write_metrics(folder: RunFolder, steps: range, metric: str = "loss") -> None:
    """Append lines as rank 0 does."""
    with open(folder.metrics, "a", encoding="utf-8") as file:
        for step in steps:
            line = {
                "step": step,
                "time": NOW + step,
                metric: 1 / (1 + step),
                "samples_per_second": 100.0,
            }
            file.write(json.dumps(line) + "\n")
