"""A run: its folder, the state of its job, and what follows from both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.contract.claims import Holder, find_holder
from paceline.contract.foreign_records import NUMBER, Fields, read_fields, read_text
from paceline.contract.run_folder import DONE, FAILED, STOPPED, RunFolder, read_verdict
from paceline.errors import ClusterError
from paceline.slurm import commands as slurm
from paceline.slurm.job_states import ENDED, WAITING, JobState
from paceline.spec.run_path import all_folders, is_fetched, list_folders, requeues_itself
from paceline.spec.shell_text import cluster, meant_for, quote
from paceline.watch.events import read_events
from paceline.watch.failure import submit_again
from paceline.watch.goodput import Goodput, read_goodput
from paceline.watch.metrics import Latest, read_latest
from paceline.watch.run_status import (
    CRASH,
    LIFELESS_HINT,
    LOST,
    OVER,
    describe_reason,
    find_status,
    newest_verdict,
    saves_first,
    seconds_lifeless,
    shows_life,
)
from paceline.watch.scheduler import query_states, read_evidence


@dataclass(frozen=True)
class Record:
    """A run as `paceline ps` shows it. What else its folder holds is read when it is asked for."""

    folder: RunFolder
    details: dict[str, Any]  # run.json
    status: str
    job: str | None
    state: JobState | None
    # why Slurm could not be asked, unless the run folder says enough
    no_answer: ClusterError | None = None
    holder: Holder | None = None  # the job start that has the run folder, or had it last

    @property
    def run_id(self) -> str:
        return self.folder.path.name

    @property
    def status_phrase(self) -> str:
        """The status after the run's name: "is running", "has failed"."""
        return "has failed" if self.status == FAILED else f"is {self.status}"

    @cached_property
    def attempts(self) -> int:
        return len(self.folder.attempts())

    @cached_property
    def latest(self) -> Latest:
        """What the run logged last, and its pace unless it is over."""
        return read_latest(f"{self.folder.path}/metrics.jsonl", with_pace=not self.is_over)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the run, in order of time."""
        return read_events(f"{self.folder.path}/events")

    @cached_property
    def goodput(self) -> Goodput:
        """Where its time went so far."""
        return read_goodput(
            self.folder, self.events, is_over=self.is_over, is_waiting=self.is_waiting
        )

    @property
    def is_over(self) -> bool:
        if self.state is not None:
            return self.state.phase == ENDED
        return self.status in OVER

    @property
    def is_waiting(self) -> bool:
        """Whether its job waits in the queue, for the first time or again."""
        return self.state is not None and self.state.phase == WAITING

    @property
    def requeue_problem(self) -> str:
        """Why a run that is over did not go back into the queue; empty if it was not meant to."""
        holder = find_holder(self.folder)
        if not self.is_over or self.status in (DONE, "cancelled") or holder is None:
            return ""
        start = holder.job_start
        if problem := read_text(start.requeue_failed, 10_000).strip():
            return problem
        wanted = start.requeue.exists() and read_verdict(start.verdict) == STOPPED
        if (
            not wanted
            or self.state is None
            or self.state.state != "FAILED"
            or self.state.was_killed
        ):
            return ""
        return f"Slurm forgot it ({CRASH}); use `{submit_again(self.folder)}`"

    @property
    def can_go_on(self) -> bool:
        """Whether a run that is over was stopped on purpose, and was asked to save first: it can
        be resumed.
        """
        if self.status == "cancelled":
            return saves_first(self) and newest_verdict(self.folder) == STOPPED
        return self.status == STOPPED

    @property
    def seconds_lifeless(self) -> float | None:
        """The seconds without a sign of life from a job that Slurm shows as running; None if it is
        alive.
        """
        return seconds_lifeless(self.folder, self.state)

    @property
    def restart_command(self) -> str:
        """What to type to restart a job that gives no sign of life, or to end it if the run is
        over.
        """
        if newest_verdict(self.folder) in (DONE, FAILED):
            return f"`scancel {self.job}`"
        if requeues_itself(self.folder):
            return f"`scontrol requeue {self.job}`"
        return f"`scancel {self.job}`, then `{submit_again(self.folder)}`"

    @property
    def hint(self) -> str:
        """What to do if Slurm could not be asked, or if the job gives no sign of life."""
        if self.no_answer is None:
            return LIFELESS_HINT if self.seconds_lifeless is not None else ""
        conf = self.details.get("slurm_conf", "")
        if conf and conf != os.environ.get("SLURM_CONF") and not is_fetched(self.folder):
            return f"The job was submitted with another SLURM_CONF: export SLURM_CONF={quote(conf)}"
        return self.no_answer.hint

    @property
    def detail(self) -> str:
        """Why the run waits, where it runs, why it failed or had nothing to do, or why Slurm did
        not requeue it.
        """
        saves = sum(event["event"] == "save_failed" for event in self.events)
        failed = f"{saves} checkpoint{'s' * (saves > 1)} could not be written" if saves else ""
        return "; ".join(filter(None, (describe_reason(self), failed)))


QueryStates = Callable[[Iterable[str]], Mapping[str, JobState]]

# What we read of run.json, which may be another user's or another version's.
RUN_FIELDS: Fields = {
    "run_id": str,
    "project": str,
    "experiment": str,
    "name": str,
    "created": NUMBER,
    "program": str,
    "command": list,
    "nodes": int,
    "nproc": int,
    "style": str,
    "host": str,
    "code": dict,
    "spec": dict,
    "args": list,
    "earlier": list,
    "slurm_conf": str,
    "request": str,
}


def find_runs(scratch: Path) -> list[RunFolder]:
    """Return the runs in a scratch folder, newest first (run ids sort by time)."""
    return [RunFolder(Path(path)) for path in list_folders(scratch, "run.json")]


def newest_first(scratch: Path) -> list[str]:
    """Return the folders of runs and sweeps, the newest first. Ids of runs tell when they began."""
    ages: dict[str, str] = {}
    for path in all_folders(scratch):
        if os.path.lexists(f"{path}/run.json"):
            ages[path] = path.rpartition("/")[2]
        with suppress(OSError):
            began = time.localtime(os.lstat(f"{path}/sweep.json").st_mtime)
            ages[path] = time.strftime("%Y%m%d-%H%M%S", began)
    return sorted(ages, key=ages.__getitem__, reverse=True)


def read_records(folders: Iterable[RunFolder], query: QueryStates = query_states) -> list[Record]:
    """Return the records of runs. If the scheduler does not respond, the states of its jobs are
    unknown.
    """
    jobs = [(folder, slurm.read_job_id(folder)) for folder in folders]
    submitted = read_evidence((folder, job) for folder, job in jobs if job is not None)
    states: Mapping[str, JobState] = {}
    problem = None
    try:
        states = query(submitted) if submitted else {}
    except ClusterError as error:
        problem = error
    return [_record(folder, job, states, problem) for folder, job in jobs]


def read_record(folder: RunFolder, query: QueryStates = query_states) -> Record:
    return read_records([folder], query)[0]


def _record(
    folder: RunFolder, job: str | None, states: Mapping[str, JobState], problem: ClusterError | None
) -> Record:
    state = states.get(job) if job is not None else None
    holder = find_holder(folder)
    status = find_status(folder, job, state, holder, reachable=problem is None)
    is_known = job is None or (state is None and status not in (LOST, "unknown"))
    if not is_known and is_fetched(folder):
        # Its job is another cluster's, whatever this one says about the number.
        state, problem = None, explain_status(folder)
        status = find_status(folder, job, None, holder, reachable=False)
    elif (
        status == "unknown"
        and holder is not None
        and holder.job == job
        and read_verdict(f"{holder.path}/verdict") is None
        and shows_life(folder)
    ):
        status = "running"  # also without an answer of Slurm: it writes, and has not ended
    is_unsure = job is not None and state is None and status in ("unknown", "running")
    details = read_fields(f"{folder.path}/run.json", RUN_FIELDS)
    no_answer = problem if is_unsure else None
    return Record(folder, details, status, job, state, no_answer, holder)


@contextmanager
def typed_there(folder: RunFolder) -> Iterator[None]:
    """Let commands about a run that was fetched name the cluster that has it."""
    name = "" if cluster() or not is_fetched(folder) else _read(folder).get("cluster", "")
    with meant_for(name or cluster()):
        yield


def explain_status(folder: RunFolder) -> ClusterError:
    """Return why the status of a run that was fetched while it was not over is not known."""
    about = _read(folder)
    name, status = about.get("cluster", "a cluster"), about.get("status", "unknown")
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(about.get("time", 0)))
    return ClusterError(
        f"fetched from {name} on {moment}, when it was {status}",
        hint=f"To update it: paceline fetch {quote(folder.key)} --on {quote(name)}",
    )


def _read(folder: RunFolder) -> dict[str, Any]:
    return read_fields(folder.fetched, {"cluster": str, "status": str, "time": NUMBER})
