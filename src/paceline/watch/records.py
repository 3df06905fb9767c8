"""What is known of a run, from its folder and, for a job, from the scheduler: asked once, however many runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.states import ENDED, LIVE, UNKNOWN, WAITING, JobState
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, STOPPED, read_verdict
from paceline.errors import ClusterError
from paceline.plan.run_path import STORE

QueryStates = Callable[[Iterable[str]], Mapping[str, JobState]]

# What a run's status says about waiting for it.
OVER = {
    DONE,
    FAILED,
    STOPPED,
    "cancelled",
    "lost",
    "timed out",
    "node failed",
    "out of memory",
    "preempted",
    "revoked",
}


@dataclass(frozen=True)
class Record:
    """A run as `paceline ps` shows it."""

    folder: RunFolder
    details: dict[str, Any]  # run.json
    status: str
    job: str | None
    state: JobState | None
    attempts: int
    step: int | None

    @property
    def run_id(self) -> str:
        return self.folder.path.name

    @property
    def is_over(self) -> bool:
        if self.state is not None:
            return self.state.phase == ENDED
        return self.status in OVER

    @property
    def detail(self) -> str:
        """Why it waits, or where it runs."""
        if self.state is None:
            return str(self.details.get("host", "")) if self.job is None else ""
        return self.state.reason if self.state.phase == WAITING else self.state.nodes


def find_runs(scratch: Path, *, limit: int | None = None) -> list[RunFolder]:
    """The runs under a scratch folder, newest first: a run's id sorts by time."""
    found = (path.parent for path in scratch.glob("*/*/*/run.json"))
    # Copies of code lie beside the runs, and may hold a file of that name.
    paths = sorted((path for path in found if path.parent.name != STORE), key=lambda path: path.name)
    newest = paths[::-1]
    return [RunFolder(path) for path in (newest if limit is None else newest[:limit])]


def read_records(folders: Iterable[RunFolder], ask: QueryStates = slurm.states) -> list[Record]:
    """Records of runs. A scheduler that does not answer leaves the states of its jobs unknown."""
    listed = list(folders)
    jobs = {folder.path: slurm.read_job_id(folder) for folder in listed}
    wanted = [job for job in jobs.values() if job is not None]
    known: Mapping[str, JobState] | None = {}
    if wanted:
        try:
            known = ask(wanted)
        except ClusterError:
            known = None
    return [_record(folder, jobs[folder.path], known) for folder in listed]


def read_record(folder: RunFolder, ask: QueryStates = slurm.states) -> Record:
    return read_records([folder], ask)[0]


def _record(folder: RunFolder, job: str | None, known: Mapping[str, JobState] | None) -> Record:
    state = known.get(job) if known is not None and job is not None else None
    return Record(
        folder=folder,
        details=read_json(folder.run_json),
        status=_status(folder, job, state, asked=known is not None),
        job=job,
        state=state,
        attempts=len(folder.attempts()),
        step=last_step(folder.metrics),
    )


def _status(folder: RunFolder, job: str | None, state: JobState | None, *, asked: bool) -> str:
    """One word. The verdict beats the scheduler's word on how a job ended: exit codes arrive garbled."""
    if state is not None and state.phase in (WAITING, LIVE, UNKNOWN):
        return state.label
    verdict = newest_verdict(folder)
    if verdict == DONE:
        return DONE
    if folder.cancelled.exists():
        return "cancelled"
    if state is not None:
        return state.label if state.label != DONE else verdict or state.label
    if job is not None and not asked and verdict in (None, STOPPED):
        return "unknown"  # its last job start may have stopped, and the job be in the queue again
    if job is None and verdict is None:
        return "running" if _runs_here(folder) else "lost"
    # A job that the queue and the accounting have forgotten, and that has left no verdict.
    return verdict or "lost"


def newest_job_start(folder: RunFolder) -> Path | None:
    job_starts = [path for path in folder.path.glob("job-starts/*") if path.is_dir()]
    return max(job_starts, key=lambda path: path.stat().st_mtime, default=None)


def newest_verdict(folder: RunFolder) -> str | None:
    job_start = newest_job_start(folder)
    return read_verdict(job_start / "verdict") if job_start else None


def _runs_here(folder: RunFolder) -> bool:
    job_start = newest_job_start(folder)
    pid = job_start.name.removeprefix("pid-") if job_start else ""
    return pid.isdigit() and psutil.pid_exists(int(pid))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def last_step(metrics: Path) -> int | None:
    """The step of the newest whole line; only the file's end is read."""
    try:
        with open(metrics, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 8192))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError):
            continue
        if isinstance(step, int):
            return step
    return None
