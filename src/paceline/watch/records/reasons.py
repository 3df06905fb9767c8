"""Why a run waits, where it runs, or why it ended, in plain words."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.files.file_owner import is_own_folder
from paceline.contract.files.foreign_records import NUMBER, read_bounded
from paceline.contract.files.grant_file import explain_refusal
from paceline.contract.run_folder import SAVES_FIRST, RunFolder
from paceline.contract.verdict import DONE, DONE_UNSAVED, STOPPED
from paceline.errors import in_one_line
from paceline.slurm import commands as slurm
from paceline.slurm.job_states.meanings import WAITING, JobState
from paceline.slurm.sbatch import awaited_jobs
from paceline.watch import origin
from paceline.watch.failure_text import describe_failure
from paceline.watch.goodput import had_nothing_left
from paceline.watch.records.run_status import (
    LOST,
    TIMED_OUT,
    killed_shell,
    newest_verdict,
    unsaved_state,
)
from paceline.watch.resume_hint import submit_again
from paceline.watch.scheduler.pending_reasons import expected_start, explain_reason, show_start
from paceline.watch.silence import describe_silence

if TYPE_CHECKING:
    from paceline.watch.records.record import Record

# newest runs of an experiment among which the one is looked for that another waits for
MAX_OTHERS = 100
BY_YOU = "by you"  # after the status: cancelled by you
TIME_LIMIT = "time limit reached"
TIME_LIMIT_CAUSE = "time limit"  # how agents name it


def describe_reason(record: Record) -> str:
    """Return why the run waits, where it runs, why it failed or had nothing to do, or why Slurm
    did not requeue it.
    """
    if record.no_answer is not None and record.status == "unknown":
        return record.no_answer.message.rstrip(".")
    if record.status == "running" and record.folder.cancelled.exists():
        return "cancelled: it saves and stops" if saves_first(record) else "cancelled: it is ending"
    if permission := _permission(record):
        return permission
    if record.state is not None and (silence := record.silence) is not None:
        verdict, nodes = newest_verdict(record.folder), record.state.nodes
        return describe_silence(
            silence, nodes=nodes, verdict=verdict, remedy=record.restart_command
        )
    if killed := killed_shell(record.folder, record.state):
        return killed
    if problem := record.requeue_problem:
        return f"not requeued: {problem}"
    if record.status == LOST and record.job is not None:
        why = "this can happen when the controller crashes"
        return f"Slurm forgot job {record.job} ({why}); use `{submit_again(record.folder)}`"
    if (
        record.is_over
        and record.status not in (DONE, STOPPED, "cancelled")
        and (problem := _problem(record))
    ):
        return problem
    if (
        record.is_over
        and record.status not in (DONE, DONE_UNSAVED, "cancelled")
        and _reached_time_limit(record)
    ):
        return TIME_LIMIT
    if record.status == DONE and had_nothing_left(record.events):
        return "nothing was left to do"
    if record.is_over and record.status == "cancelled" and (ended := _cancelled(record)):
        return ended
    if record.state is None:
        problem = record.no_answer.message.rstrip(".") if record.no_answer is not None else ""
        host = str(record.details.get("host", "")) if record.job is None else _last_nodes(record)
        return "; ".join(filter(None, (host, problem)))
    if record.state.reason.startswith("Dependency"):
        return _dependency(record, record.state)
    return (
        _waits_for(record, record.state)
        if record.state.phase == WAITING
        else record.state.nodes or _last_nodes(record)
    )


def _cancelled(record: Record) -> str:
    """Return who cancelled a run, as far as that is known, and from where it can continue."""
    by_you = record.folder.cancelled.exists() and is_own_folder(record.folder.path)
    saved = find_checkpoints(record.folder.path)
    again = f"can continue from step {checkpoint_step(saved[0].name)}" if saved else ""
    return "; ".join(filter(None, (BY_YOU if by_you else "", again)))


def _last_nodes(record: Record) -> str:
    """Return the nodes of the newest job start, as its agents know them: Slurm forgets jobs that
    are over.
    """
    names = [
        event["nodelist"]
        for event in record.events
        if event["event"] == "node" and event.get("nodelist")
    ]
    return names[-1] if names else ""


def _permission(record: Record) -> str:
    """Return that a run waits for permission to start, or did not get it; empty for all others."""
    last: dict[str, Any] = next(
        (each for each in reversed(record.events) if each["event"] in ("awaits_grant", "grant")), {}
    )
    deadline = last.get("deadline")
    if record.status == "running" and isinstance(deadline, NUMBER) and 0 <= deadline < 1e11:
        return (
            "waits for permission from your laptop until "
            f"{time.strftime('%H:%M', time.localtime(deadline))}"
        )
    return explain_refusal(record.folder) if record.status == "cancelled" else ""


def _waits_for(record: Record, state: JobState) -> str:
    """Return why a job waits, and until when. One that Slurm holds waits for a person."""
    job, now = record.details.get("spec", {}).get("job"), origin.now()
    words = explain_reason(
        state.reason, gpus=isinstance(job, dict) and bool(job.get("gpus_per_node"))
    )
    if re.search("held|hold", state.reason, re.IGNORECASE):
        by_admin = "admin" in state.reason.lower()
        remedy = (
            "only an administrator can release it"
            if by_admin
            else f"use `scontrol release {record.job}`"
        )
        return f"{words}; {remedy}"
    if state.reason == "BeginTime" and (record.attempts or record.folder.requeues.exists()):
        words += " (Slurm delays a requeued job)"
    start = expected_start(state, now)
    return "; ".join(
        filter(None, (words, f"expected to start {show_start(start, now)}" if start else ""))
    )


def saves_first(record: Record) -> bool:
    """Whether a run that was cancelled was asked to save first, as local runs always are."""
    with suppress(OSError, ValueError):
        return (
            record.job is None or SAVES_FIRST in read_bounded(record.folder.cancelled, 100).decode()
        )
    return False


def _reached_time_limit(record: Record) -> bool:
    """Whether the time limit ended the run: Slurm says so, or the last thing that its agents were
    asked for.
    """
    if record.status == TIMED_OUT:
        return True
    asked = [
        event.get("by")
        for event in record.events
        if event["event"] in ("started", "stop_requested")
    ]
    return bool(asked) and isinstance(asked[-1], str) and TIME_LIMIT_CAUSE in asked[-1]


def _problem(record: Record) -> str:
    if record.status == DONE_UNSAVED:
        return unsaved_state(record.folder)
    return in_one_line(next(iter(describe_failure(record.folder)), ""))


def _dependency(record: Record, state: JobState) -> str:
    jobs = ", ".join(awaited_jobs(record.folder, state.id))
    if not jobs:
        return state.reason
    if state.reason == "Dependency":
        return f"waits for job {jobs}{_name_runs(record, jobs)}"
    return f"job {jobs} did not succeed ({state.reason})"


def _name_runs(record: Record, jobs: str) -> str:
    """Return which runs of the same experiment have these jobs; empty if none has."""
    try:
        paths = sorted(record.folder.path.parent.iterdir())[-MAX_OTHERS:]
    except OSError:
        return ""
    wanted = set(jobs.split(", "))
    names = [path.name for path in paths if slurm.read_job_id(RunFolder(path)) in wanted]
    return f" ({', '.join(names)})" if names else ""
