"""Create sweep folders as sweeps leave them, for tests that read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.contract.sweep_folder import Point, Search, SweepFolder


def make_sweep(path: Path, points: Iterable[Point], **search: Any) -> SweepFolder:
    """Create a sweep without started trials."""
    path.mkdir(parents=True)
    folder = SweepFolder(path)
    fields = {"name": path.name, "metric": "loss", **search}
    folder.spec.write_text(Search(**fields).to_json())
    folder.points.write_text("".join(point.to_line() for point in points))
    folder.trials.mkdir()
    return folder


def grid(values: Iterable[dict[str, Any]], seeds: int = 0) -> list[Point]:
    found: list[Point] = []
    for group, point in enumerate(values):
        for seed in range(seeds) if seeds else [None]:
            found.append(Point(len(found), group, point, seed))
    return found


def begin(folder: SweepFolder, number: int, *, job: str | None = None, **fields: Any) -> None:
    """Write what a trial's folder holds once the trial has started."""
    trial = folder.trial(number)
    trial.path.mkdir()
    trial.run_json.write_text("{}")
    trial.trial.write_text(json.dumps({"number": number, **fields}))
    if job is not None:
        trial.job.write_text(job + "\n")


def end(
    folder: SweepFolder, number: int, state: str = "done", value: float | None = None, **fields: Any
) -> None:
    begin(folder, number, **{key: fields[key] for key in ("point", "seed") if key in fields})
    result = {
        "state": state,
        "value": value,
        "started": 100.0,
        "ended": 130.0,
        "error": "",
        **fields,
    }
    folder.trial(number).result.write_text(json.dumps(result))


def record_jobs(folder: SweepFolder, job: str, tasks: Mapping[str, list[int]]) -> None:
    line = json.dumps({"time": 1.0, "job": job, "submission": 1, "tasks": dict(tasks)})
    with open(folder.jobs, "a", encoding="utf-8") as file:
        file.write(line + "\n")
