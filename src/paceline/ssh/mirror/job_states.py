"""What the scheduler of a cluster says about jobs, as it travels to the mirror and is kept there.

Slurm writes times by the cluster's clock and zone. They travel as seconds since 1970.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_object
from paceline.contract.run_folder import write_atomically
from paceline.errors import ClusterError
from paceline.slurm.job_states.meanings import JobState

FILE = "jobs.json"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
NOT_ASKED = "UNKNOWN"  # the state of a job about which the cluster was not asked
MAX_JOBS = 20_000
_CELL = (str, int, float)


def to_row(state: JobState | None) -> list[Any] | None:
    """Return a state for the stream; None for a job that the scheduler does not know."""
    if state is None:
        return None
    values = asdict(state)
    with suppress(ValueError, OverflowError):
        values["start"] = time.mktime(time.strptime(state.start, TIME_FORMAT))
    return list(values.values())


def from_row(row: Any) -> JobState | None:
    """Return the state of a row. Raises ValueError if it is none."""
    if row is None:
        return None
    names = [each.name for each in fields(JobState)]
    if (
        not isinstance(row, list)
        or len(row) != len(names)
        or not all(isinstance(each, _CELL) for each in row)
    ):
        raise ValueError("a row is not the state of a job")
    values = dict(zip(names, row, strict=True))
    if not isinstance(values["start"], str):
        try:
            values["start"] = time.strftime(TIME_FORMAT, time.localtime(values["start"]))
        except (ValueError, OverflowError, OSError) as problem:
            raise ValueError(f"a job has no start: {problem}") from None
    return JobState(**{name: str(value) for name, value in values.items()})


def keep_states(folder: Path, rows: Mapping[str, Any], problem: str, hint: str) -> None:
    """Add what has arrived to what is known. Raises ValueError for rows that are no states."""
    for row in rows.values():
        from_row(row)
    known = _read(folder)
    if not problem:
        known = {**known, **rows}
    kept = dict(list(known.items())[-MAX_JOBS:])
    write_atomically(
        folder / FILE, json.dumps({"jobs": kept, "problem": problem, "hint": hint}), mode=0o600
    )


def read_states(folder: Path, jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of jobs as the cluster last told them. Jobs that it does not know are left out.

    Raises ClusterError if the scheduler did not answer there.
    """
    table = _table(folder)
    if problem := table.get("problem"):
        raise ClusterError(str(problem), hint=str(table.get("hint", "")))
    rows, found = _read(folder), {}
    for job in jobs:
        state = None
        with suppress(ValueError):
            state = from_row(rows[job]) if job in rows else JobState(job, NOT_ASKED)
        if state is not None:
            found[job] = state
    return found


def _read(folder: Path) -> dict[str, Any]:
    rows = _table(folder).get("jobs")
    return rows if isinstance(rows, dict) else {}


def _table(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / FILE)
    except (OSError, ValueError):
        return {}
