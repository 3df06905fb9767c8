"""Where the runs that views show come from: this machine, or a copy of those of a cluster.

A copy is laid out like the scratch folder of the cluster, so views read it like any other. What it
cannot have as files of runs lies beside it: what time it is there, and what Slurm said about jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import read_fields
from paceline.errors import ClusterError
from paceline.slurm.job_states import JobState
from paceline.spec.shell_text import meant_for

NEWS, STATES = "heard.json", "jobs.json"
FRESH = 60.0  # seconds without news after which a copy counts as old
NOT_ASKED = "UNKNOWN"  # the state of a job about which the cluster was not asked
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


@dataclass(frozen=True)
class ClusterCopy:
    """A copy of the runs of a cluster. `act` does something to a run there, by verb and name."""

    cluster: str
    base: Path
    act: Callable[[str, str], str]

    @property
    def scratch(self) -> Path:
        return self.base / "runs"

    def news(self) -> dict[str, Any]:
        """Return when the cluster was last heard of, by both clocks, and why nothing new comes."""
        return {
            "scratch": "",
            "there": 0.0,
            "here": 0.0,
            "problem": "",
            **read_fields(self.base / NEWS),
        }


_shown: ClusterCopy | None = None


def shown() -> ClusterCopy | None:
    """Return the copy that this process shows; None if it shows the runs of this machine."""
    return _shown


@contextmanager
def show(copy: ClusterCopy) -> Iterator[None]:
    """Let everything in this process that reads runs read a copy."""
    global _shown
    before, _shown = _shown, copy
    try:
        with meant_for(copy.cluster):
            yield
    finally:
        _shown = before


def now() -> float:
    """Return the time by the clock of whoever writes the runs; without news, that of the last."""
    if _shown is None:
        return time.time()
    news = _shown.news()
    return float(news["there"]) + (0.0 if _problem() else time.time() - news["here"])


def age() -> float:
    """Return for how long nothing new has come, in seconds; 0 if it does."""
    return max(0.0, time.time() - _shown.news()["here"]) if _shown and _problem() else 0.0


def status() -> str:
    """Return why nothing new comes, in one line; empty if it does."""
    problem = _problem()
    if _shown is None or not problem:
        return ""
    return f"{problem}; showing data received until {show_moment(_shown.news()['here'])}"


def place(path: Path | str) -> str:
    """Return where a file is for a person to read: of a copy, on which cluster and where there."""
    if _shown is None or not Path(path).is_relative_to(_shown.scratch):
        return str(path)
    inner = Path(path).relative_to(_shown.scratch)
    return f"{_shown.cluster}:{Path(str(_shown.news()['scratch'])) / inner}"


def read_job_states(base: Path, jobs: Iterable[str]) -> dict[str, JobState]:
    """Return the states of jobs as a cluster last told them, without jobs that it does not know.

    Raises ClusterError if Slurm did not answer there.
    """
    table = read_fields(base / STATES)
    if problem := table.get("problem"):
        raise ClusterError(str(problem), hint=str(table.get("hint", "")))
    rows, found = table.get("jobs", {}), {}
    for job in jobs:
        if (row := rows.get(job, [job, NOT_ASKED])) is not None:
            found[job] = JobState(*(_local_time(each) for each in row))
    return found


def state_row(state: JobState | None) -> list[Any] | None:
    """Return the state of a job for `jobs.json`; None for a job that Slurm does not know.

    Slurm writes times in the cluster's zone; they travel as seconds since 1970.
    """
    if state is None:
        return None
    start = parse_time(state.start) or state.start
    row = [state.id, state.state, state.reason, state.nodes, start, state.elapsed]
    return [*row, state.exit_code]


def parse_time(text: str) -> float | None:
    """Return a time that Slurm has written, in seconds since 1970; None if it is none."""
    try:
        return time.mktime(time.strptime(text, TIME_FORMAT))
    except (ValueError, OverflowError):
        return None


def show_moment(moment: float) -> str:
    """Return a time of day, with the date unless it is today's."""
    is_today = time.strftime("%F", time.localtime(moment)) == time.strftime("%F")
    return time.strftime("%H:%M" if is_today else "%F %H:%M", time.localtime(moment))


def _local_time(cell: str | float) -> str:
    if isinstance(cell, str):
        return cell
    return time.strftime(TIME_FORMAT, time.localtime(cell))


def _problem() -> str:
    """Return why nothing new comes from the cluster that is shown; empty if it does."""
    if _shown is None:
        return ""
    news = _shown.news()
    is_fresh = 0 <= time.time() - news["here"] < FRESH
    return str(news["problem"]) or ("" if is_fresh else f"no news from {_shown.cluster}")
