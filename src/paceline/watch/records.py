"""Records of runs, from their folders and, for jobs, from a single query to the scheduler."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.cluster.runs import claims
from paceline.cluster.runs.claims import Holder, find_holder
from paceline.cluster.runs.folder import list_folders
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.sbatch import awaited_jobs
from paceline.cluster.slurm.states import ENDED, LIVE, UNKNOWN, WAITING, JobState
from paceline.cluster.slurm.states import STATES as SLURM_STATES
from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.files.foreign_records import NUMBER, Fields, keep_valid, read_bounded, read_object
from paceline.contract.run_folder import SAVES_FIRST, RunFolder
from paceline.contract.verdict import DONE, DONE_UNSAVED, FAILED, STOPPED, read_verdict
from paceline.errors import ClusterError, in_one_line
from paceline.plan.quote import quote
from paceline.watch.failures import describe_failure
from paceline.watch.goodput import had_nothing_left, read_events
from paceline.watch.metrics.latest import Latest, read_latest
from paceline.watch.resume_hint import submit_again
from paceline.watch.scheduler.evidence import Evidence, read_evidence
from paceline.watch.scheduler.pending_reasons import expected_start, explain_reason, show_start
from paceline.watch.scheduler.shared_answer import query_states
from paceline.watch.silence import SILENCE_HINT, describe_silence, seconds_run, seconds_silent

QueryStates = Callable[[Iterable[str]], Mapping[str, JobState]]

# What we read of run.json, which may be another user's or another version's.
RUN_FIELDS: Fields = {
    "run_id": str, "project": str, "experiment": str, "name": str, "created": NUMBER, "program": str, "command": list,
    "nodes": int, "nproc": int, "style": str, "host": str, "code": dict, "spec": dict, "args": list,
    "earlier": list, "slurm_conf": str,
}  # fmt: skip

# Statuses of runs that are over.
LOST, TIMED_OUT = "lost", "timed out"
TIME_LIMIT = "time limit reached"
TIME_LIMIT_CAUSE = "time limit"  # how agents name it
_LOCAL_STATUS = {claims.HERE: "running", claims.ELSEWHERE: "unknown", claims.OVER: LOST}
OVER = {
    DONE,
    DONE_UNSAVED,
    FAILED,
    STOPPED,
    "cancelled",
    LOST,
    TIMED_OUT,
    "node failed",
    "out of memory",
    "preempted",
    "revoked",
}

# All of them. A state of Slurm that we don't know is a status as well.
STATUSES = OVER | {label for label, _ in SLURM_STATES.values()} | {"prepared", "unknown"}


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
    no_answer: ClusterError | None = None  # why Slurm could not be asked, if the status is unknown for that reason
    holder: Holder | None = None  # the job start that has the run folder, or had it last
    newest: Latest | None = None  # what it logged last, if that has been read

    @property
    def run_id(self) -> str:
        return self.folder.path.name

    @property
    def latest(self) -> Latest:
        """What the run logged last, and its pace unless it is over."""
        return self.newest or read_latest(self.folder.metrics, with_pace=not self.is_over)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What happened in the run, in order of time."""
        return read_events(f"{self.folder.path}/events")

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
        if not self.is_over or self.status == DONE:
            return ""
        holder = find_holder(self.folder)
        if holder is None:
            return ""
        with suppress(OSError, ValueError):
            return read_bounded(holder.job_start.requeue_failed, 10_000).decode().strip()
        wanted = holder.job_start.requeue.exists() and read_verdict(holder.job_start.verdict) == STOPPED
        if self.may_requeue and wanted and self.state is not None and self.state.state == "FAILED":
            return f"Slurm forgot it (a controller that crashes may); {self._how_to_resume}"
        return ""

    @property
    def silence(self) -> float | None:
        """The seconds without a sign of life from a job that Slurm shows as running; None if it is alive."""
        return seconds_silent(self.folder, self.state)

    @property
    def restart_command(self) -> str:
        """What to type to restart a job that gives no sign of life, or to end it if the run is over."""
        if newest_verdict(self.folder) in (DONE, FAILED):
            return f"`scancel {self.job}`"
        if self.may_requeue:
            return f"`scontrol requeue {self.job}`"
        return f"`scancel {self.job}`, then `{submit_again(self.folder)}`"

    @property
    def may_requeue(self) -> bool:
        """Whether the user lets the job go back into the queue."""
        resume = self.details.get("spec", {}).get("resume")
        return not isinstance(resume, dict) or bool(resume.get("requeue", True))

    @property
    def _how_to_resume(self) -> str:
        return f"use `{submit_again(self.folder)}`"

    @property
    def hint(self) -> str:
        """What to do if Slurm could not be asked, or if the job gives no sign of life."""
        if self.no_answer is None:
            return SILENCE_HINT if self.silence is not None else ""
        conf = self.details.get("slurm_conf", "")
        if conf and conf != os.environ.get("SLURM_CONF"):
            return f"The job was submitted with another SLURM_CONF: export SLURM_CONF={quote(conf)}"
        return self.no_answer.hint

    @property
    def detail(self) -> str:
        """Why the run waits, where it runs, why it failed or had nothing to do, or why Slurm did not requeue it."""
        saves = sum(event["event"] == "save_failed" for event in self.events)
        parts = [self._reason(), f"{saves} checkpoint{'s' * (saves > 1)} could not be written" if saves else ""]
        return "; ".join(part for part in parts if part)

    def _reason(self) -> str:
        if self.no_answer is not None:
            return self.no_answer.message.rstrip(".")
        if self.status == "running" and self.folder.cancelled.exists():
            return "cancelled: it saves and stops" if self._saves_first() else "cancelled: it is ending"
        if self.state is not None and (silence := self.silence) is not None:
            verdict, nodes = newest_verdict(self.folder), self.state.nodes
            return describe_silence(silence, nodes=nodes, verdict=verdict, remedy=self.restart_command)
        if killed := killed_shell(self.folder, self.state):
            return killed
        if problem := self.requeue_problem:
            return f"not requeued: {problem}"
        if self.status == LOST and self.job is not None:
            return f"Slurm forgot job {self.job} (a controller that crashes may); {self._how_to_resume}"
        if self.is_over and self.status not in (DONE, STOPPED, "cancelled") and (problem := self._problem()):
            return problem
        if self.is_over and self.status not in (DONE, DONE_UNSAVED, "cancelled") and self._reached_time_limit():
            return TIME_LIMIT
        if self.status == DONE and had_nothing_left(self.events):
            return "nothing was left to do"
        if self.state is None:
            return str(self.details.get("host", "")) if self.job is None else ""
        if self.state.reason.startswith("Dependency"):
            return self._dependency(self.state)
        return self._waits_for(self.state) if self.state.phase == WAITING else self.state.nodes

    def _waits_for(self, state: JobState) -> str:
        """Return why a job waits, and until when. One that Slurm holds waits for a person."""
        job, now = self.details.get("spec", {}).get("job"), time.time()
        words = explain_reason(state.reason, gpus=isinstance(job, dict) and bool(job.get("gpus_per_node")))
        if re.search("held|hold", state.reason, re.IGNORECASE):
            by_admin = "admin" in state.reason.lower()
            remedy = "only an administrator can release it" if by_admin else f"use `scontrol release {self.job}`"
            return f"{words}; {remedy}"
        start = expected_start(state, now)
        return "; ".join(filter(None, (words, f"expected to start {show_start(start, now)}" if start else "")))

    def _saves_first(self) -> bool:
        """Whether a run that was cancelled was asked to save first, as local runs always are."""
        with suppress(OSError, ValueError):
            return self.job is None or SAVES_FIRST in read_bounded(self.folder.cancelled, 100).decode()
        return False

    def _reached_time_limit(self) -> bool:
        """Whether the time limit ended the run: Slurm says so, or the last thing that its agents were asked for."""
        if self.status == TIMED_OUT:
            return True
        asked = [event.get("by") for event in self.events if event["event"] in ("started", "stop_requested")]
        return bool(asked) and isinstance(asked[-1], str) and TIME_LIMIT_CAUSE in asked[-1]

    def _problem(self) -> str:
        if self.status == DONE_UNSAVED:
            return unsaved_state(self.folder)
        return in_one_line(next(iter(describe_failure(self.folder)), ""))

    def _dependency(self, state: JobState) -> str:
        jobs = ", ".join(awaited_jobs(self.folder, state.id))
        if not jobs:
            return state.reason
        if state.reason == "Dependency":
            return f"waits for job {jobs}"
        return f"job {jobs} did not succeed ({state.reason})"


def find_runs(scratch: Path, *, limit: int | None = None) -> list[RunFolder]:
    """Return the runs in a scratch folder, newest first (run ids sort by time)."""
    found = list_folders(scratch, "run.json")
    return [RunFolder(Path(path)) for path in (found if limit is None else islice(found, limit))]


def read_records(folders: Iterable[RunFolder], query: QueryStates = query_states) -> list[Record]:
    """Return the records of runs. If the scheduler does not respond, the states of its jobs are unknown."""
    return list(iterate_records(folders, query))


def iterate_records(folders: Iterable[RunFolder], query: QueryStates = query_states) -> Iterator[Record]:
    """Yield the same records one by one: thousands of them need not be in memory at once."""
    listed = list(folders)
    return map(record_maker(listed, query), listed)


def record_maker(listed: Sequence[RunFolder], query: QueryStates = query_states) -> Callable[[RunFolder], Record]:
    """Ask the scheduler about these runs, once, and return what makes the record of each."""
    jobs = {folder.path: slurm.read_job_id(folder) for folder in listed}
    submitted = read_evidence((folder, job) for folder in listed if (job := jobs[folder.path]) is not None)
    states: Mapping[str, JobState] = {}
    problem = None
    if submitted:
        try:
            states = {
                job: state
                for job, state in query(submitted).items()
                if job not in submitted or not _is_another(state, submitted[job])
            }
        except ClusterError as error:
            problem = error
    return lambda folder: _record(folder, jobs[folder.path], states, problem)


def _is_another(state: JobState, evidence: Evidence) -> bool:
    """Return whether a job with the id of a run that was over long ago is not the run's: it started after that.

    Slurm gives ids away again, and so does another cluster. One that goes on since then hangs.
    """
    if not evidence.is_closed or not evidence.verdict or state.phase == ENDED:
        return False
    return state.phase == WAITING or time.time() - seconds_run(state) > evidence.verdict


def read_record(folder: RunFolder, query: QueryStates = query_states) -> Record:
    return read_records([folder], query)[0]


def _record(folder: RunFolder, job: str | None, states: Mapping[str, JobState], problem: ClusterError | None) -> Record:
    state = states.get(job) if job is not None else None
    holder = find_holder(folder)
    status = _status(folder, job, state, holder, reachable=problem is None)
    is_over = state.phase == ENDED if state is not None else status in OVER
    latest = read_latest(f"{folder.path}/metrics.jsonl", with_pace=not is_over)
    return Record(
        folder=folder,
        details=keep_valid(read_json(f"{folder.path}/run.json"), RUN_FIELDS),
        status=status,
        job=job,
        state=state,
        attempts=len(folder.attempt_numbers()),
        step=_step(folder) if latest.step is None else latest.step,
        no_answer=problem if job is not None and status == "unknown" else None,
        holder=holder,
        newest=latest,
    )


def _status(
    folder: RunFolder, job: str | None, state: JobState | None, holder: Holder | None, *, reachable: bool
) -> str:
    """Return the status. The verdict overrides Slurm's state of an ended job, because exit codes arrive garbled."""
    if state is not None and state.phase in (WAITING, LIVE, UNKNOWN):
        return state.label
    verdict = read_verdict(f"{holder.path}/verdict") if holder else None
    if verdict == DONE:
        return DONE_UNSAVED if _unsaved_state(holder) else DONE
    if os.path.exists(f"{folder.path}/cancelled") and not (job is None and _runs_here(holder)):
        return "cancelled"
    if state is not None:
        # A job is completed only after a verdict: this one is another's, with an id that Slurm has given away twice.
        return state.label if state.label != DONE else verdict or LOST
    if job is not None and not reachable and verdict in (None, STOPPED):
        return "unknown"  # the last job start may have stopped, with the job back in the queue
    if job is None and holder is None and folder.script.exists():
        return "prepared"  # `submit --script-only` wrote its script
    if job is None and verdict is None:
        return _LOCAL_STATUS[holder.whereabouts() if holder else claims.OVER]
    # Without a verdict, neither the queue nor accounting knows the job any more.
    return verdict or LOST


def _runs_here(holder: Holder | None) -> bool:
    return holder is not None and holder.whereabouts() == claims.HERE


def newest_verdict(folder: RunFolder) -> str | None:
    """Return the verdict of the job start that has the run folder, or had it last."""
    holder = find_holder(folder)
    return read_verdict(holder.job_start.verdict) if holder else None


def unsaved_state(folder: RunFolder) -> str:
    """Return which last state of the run could not be saved; empty if it could."""
    return _unsaved_state(find_holder(folder))


def _unsaved_state(holder: Holder | None) -> str:
    try:
        return read_bounded(f"{holder.path}/unsaved", 10_000).decode().strip() if holder else ""
    except (OSError, ValueError):
        return ""


def killed_shell(folder: RunFolder, state: JobState | None) -> str:
    """Return that the job's batch shell was killed; empty if it was not, or if nobody can know.

    The shell exits on its own with a code, whatever becomes of the run. Slurm fails a job whose shell ends by a
    signal, and ends its steps. Some versions call that a launch failure, also after hours.
    """
    if state is None or state.state != "FAILED":
        return ""
    holder = find_holder(folder)
    if holder is None or not holder.job_start.agent.exists():
        return ""
    number = re.match(r"RaisedSignal:(\d+)", state.reason) or re.fullmatch(r"\d+:([1-9]\d*)", state.exit_code)
    if number is None and state.reason != "JobLaunchFailure":
        return ""
    return f"the batch shell was killed{f' by signal {number[1]}' if number else ''}"


def read_json(path: Path | str) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing or invalid."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def _step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint."""
    found = find_checkpoints(folder.path)
    return checkpoint_step(found[0].name) if found else None
