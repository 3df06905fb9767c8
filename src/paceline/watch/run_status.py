"""The status of a run, and in plain words why it waits, where it runs, or why it ended.

The status follows from the run's folder, from what Slurm says of its job, and from who has the run
folder. Slurm may take a dead job for a running one for half an hour: after a node has restarted so
quickly that it never counted as down, and above all if the controller restarts too. So a job also
has to give a sign of life: its agents write to the run folder.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from paceline.contract import claims
from paceline.contract.checkpoint import checkpoint_step, find_checkpoints
from paceline.contract.claims import Holder, find_holder
from paceline.contract.foreign_records import NUMBER, read_fields, read_text
from paceline.contract.run_folder import (
    DONE,
    DONE_UNSAVED,
    FAILED,
    SAVES_FIRST,
    STOPPED,
    RunFolder,
    read_verdict,
)
from paceline.errors import in_one_line
from paceline.slurm.commands import awaited_jobs
from paceline.slurm.job_states import LIVE, UNKNOWN, WAITING, JobState
from paceline.slurm.job_states import STATES as SLURM_STATES
from paceline.spec.quantities import parse_seconds, show_seconds
from paceline.spec.user_files import is_own_folder
from paceline.watch import origin
from paceline.watch.events import had_nothing_left, newest_change
from paceline.watch.failure import describe_failure, submit_again

if TYPE_CHECKING:
    from paceline.watch.records import Record


# Statuses of runs that are over.
LOST, TIMED_OUT = "lost", "timed out"
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


def find_status(
    folder: RunFolder,
    job: str | None,
    state: JobState | None,
    holder: Holder | None,
    *,
    reachable: bool,
) -> str:
    """Return the status. The verdict overrides Slurm's state of an ended job, because exit codes
    arrive garbled.
    """
    if state is not None and state.phase in (WAITING, LIVE, UNKNOWN):
        return state.label
    verdict = read_verdict(f"{holder.path}/verdict") if holder else None
    if verdict == DONE:
        return DONE_UNSAVED if unsaved_state(holder) else DONE
    if os.path.exists(f"{folder.path}/cancelled") and not (
        job is None and holder is not None and holder.whereabouts() == claims.HERE
    ):
        return "cancelled"
    if verdict == STOPPED and state is not None and state.state == "FAILED":
        return STOPPED  # its job exits with 75, which Slurm calls a failure
    if state is not None:
        # A job is completed only after a verdict: this one is another's, with an id that Slurm has
        # given away twice.
        return state.label if state.label != DONE else verdict or LOST
    if job is not None and not reachable and verdict in (None, STOPPED):
        return "unknown"  # the last job start may have stopped, with the job back in the queue
    if job is None and holder is None and folder.script.exists():
        return "prepared"  # `submit --script-only` wrote its script
    if job is None and verdict is None:
        return _LOCAL_STATUS[holder.whereabouts() if holder else claims.OVER]
    # Without a verdict, neither the queue nor accounting knows the job any more.
    return verdict or LOST


def newest_verdict(folder: RunFolder) -> str | None:
    """Return the verdict of the job start that has the run folder, or had it last."""
    holder = find_holder(folder)
    return read_verdict(holder.job_start.verdict) if holder else None


def unsaved_state(holder: Holder | None) -> str:
    """Return which last state of the run could not be saved; empty if it could."""
    return read_text(f"{holder.path}/unsaved", 10_000).strip() if holder else ""


# seconds; a file server may show a write a minute late, and a busy node may write late
LIMIT = 300.0
FRESH = 120.0  # seconds since a sign of life after which nobody can say that a run goes on
MISSED_SAMPLES = 4  # that a node should have written meanwhile
LIFELESS_HINT = (
    "If a node restarts quickly, Slurm may show its dead job as running. Check with `paceline "
    "doctor`, which asks the "
    "node. A restart continues from the newest checkpoint."
)


def seconds_lifeless(folder: RunFolder, state: JobState | None) -> float | None:
    """Return for how long the agents of a running job have written nothing; None if that is no
    reason to worry.

    Only agents that sample the use of their nodes write at intervals, whatever the ranks do. It
    means nothing without samples (`--system-metrics 0s`), or before the first one of this job
    start, while the job loads modules or its agents wait for each other.
    """
    if state is None or state.state != "RUNNING" or folder.cancelled.exists():
        return None
    holder = find_holder(folder)
    spec = read_fields(folder.launch_spec, {"system_metrics": NUMBER})
    interval = float(spec.get("system_metrics", 0.0))
    if holder is None or holder.job != state.id or not interval:
        return None
    if spec.get("trial") and holder.job_start.verdict.exists():
        return None  # its job goes on with the next trial
    limit, now = max(LIMIT, MISSED_SAMPLES * interval), origin.now()
    sampled = newest_change(folder.system.glob("*.jsonl"))
    if not limit <= now - sampled < seconds_run(state):
        return None  # there are none yet, or they are new, or an earlier job start's
    parents = [folder.system, folder.events, holder.job_start.path]
    parents += [each.path for each in folder.attempts()[-1:]]
    written = [path for parent in parents for path in parent.glob("*")]
    seconds = now - newest_change([folder.slurm_log, folder.metrics, *written])
    return seconds if seconds >= limit else None


def shows_life(folder: RunFolder) -> bool:
    """Return whether ranks or agents have just written what they write at intervals: metrics, or
    samples of a node.
    """
    return origin.now() - newest_change([folder.metrics, *folder.system.glob("*.jsonl")]) < FRESH


def seconds_run(state: JobState) -> float:
    """Return how long the job has run since its last start; 0 if Slurm does not say."""
    try:
        return parse_seconds(state.elapsed)
    except ValueError:
        return 0.0


# -- the reason ------------------------------------------------------------------------------------


CRASH = "this can happen when the controller crashes"
BY_YOU = "by you"  # after the status: cancelled by you
TIME_LIMIT = "time limit reached"
TIME_LIMIT_CAUSE = "time limit"  # how agents name it


def describe_reason(record: Record) -> str:
    """Return why the run waits, where it runs, why it failed or had nothing to do, or why Slurm
    did not requeue it.
    """
    state = record.state
    if record.no_answer is not None and record.status == "unknown":
        return record.no_answer.message.rstrip(".")
    if record.status == "running" and record.folder.cancelled.exists():
        return "cancelled: it saves and stops" if saves_first(record) else "cancelled: it is ending"
    if state is not None and (seconds := record.seconds_lifeless) is not None:
        verdict, cause = (
            newest_verdict(record.folder),
            "a node may have restarted without Slurm noticing",
        )
        if verdict in (DONE, FAILED):
            cause = f"it is {verdict}, but Slurm has not noticed"
        silent = f"no sign of life from {state.nodes} for {show_seconds(seconds)}"
        return f"{silent}: {cause}; use {record.restart_command}"
    if problem := record.requeue_problem:
        return f"not requeued: {problem}"
    if record.status == LOST and record.job is not None:
        return f"Slurm forgot job {record.job} ({CRASH}); use `{submit_again(record.folder)}`"
    if record.is_over and (why := _describe_end(record)):
        return why
    if state is None:
        problem = record.no_answer.message.rstrip(".") if record.no_answer is not None else ""
        host = str(record.details.get("host", "")) if record.job is None else _last_nodes(record)
        return "; ".join(filter(None, (host, problem)))
    if state.reason.startswith("Dependency"):
        return _dependency(record, state)
    if state.phase == WAITING:
        return _waits_for(record, state)
    return state.nodes or _last_nodes(record)


def _describe_end(record: Record) -> str:
    """Return why a run ended as it did; empty if there is nothing more to say."""
    if record.status == DONE:
        return "nothing was left to do" if had_nothing_left(record.events) else ""
    if record.status == DONE_UNSAVED:
        return unsaved_state(record.holder)
    if record.state is not None and record.state.was_killed and record.attempts:
        return "the batch shell was killed"
    if record.status != "cancelled":
        lines = [] if record.status == STOPPED else describe_failure(record.folder)
        problem = in_one_line(next(iter(lines), ""))
        return problem or (TIME_LIMIT if _reached_time_limit(record) else "")
    by_you = record.folder.cancelled.exists() and is_own_folder(record.folder.path)
    saved = find_checkpoints(record.folder.path)
    again = f"can continue from step {checkpoint_step(saved[0].name)}" if saved else ""
    return "; ".join(filter(None, (BY_YOU if by_you else "", again)))


def _last_nodes(record: Record) -> str:
    """Return the nodes of the newest job start, as its agents know them: Slurm forgets jobs that
    are over.
    """
    lists = (event.get("nodelist") for event in record.events if event["event"] == "node")
    return next(reversed(list(filter(None, lists))), "")


def _waits_for(record: Record, state: JobState) -> str:
    """Return why a job waits, and until when. One that Slurm holds waits for a person."""
    job, now = record.details.get("spec", {}).get("job"), origin.now()
    gpus = isinstance(job, dict) and bool(job.get("gpus_per_node"))
    words = explain_reason(state.reason, gpus=gpus)
    if re.search("held|hold", state.reason, re.IGNORECASE):
        if "admin" in state.reason.lower():
            return f"{words}; only an administrator can release it"
        return f"{words}; use `scontrol release {record.job}`"
    requeued = any(job_start.requeue.exists() for job_start in record.folder.job_starts())
    if state.reason == "BeginTime" and (record.attempts or requeued):
        words += " (Slurm delays a requeued job)"
    start = expected_start(state, now)
    return f"{words}; expected to start {show_start(start, now)}" if start else words


def saves_first(record: Record) -> bool:
    """Whether a run that was cancelled was asked to save first, as local runs always are."""
    return record.job is None or SAVES_FIRST in read_text(record.folder.cancelled, 100)


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


def _dependency(record: Record, state: JobState) -> str:
    jobs = ", ".join(awaited_jobs(record.folder, state.id))
    if jobs and state.reason == "Dependency":
        return f"waits for job {jobs}"
    return f"job {jobs} did not succeed ({state.reason})" if jobs else state.reason


# Slurm's reason -> what it means. {what} is what the job needs: GPUs or nodes.
REASONS = {
    "Priority": "waits for {what}: other jobs come first",
    "Resources": "waits for {what} to become free",
    "BeginTime": "waits for its begin time",
    "Cleaning": "Slurm is cleaning up after its last start",
    "Prolog": "Slurm is preparing its nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that did not succeed",
    "DeadLine": "cannot end before its deadline",
    "JobArrayTaskLimit": "waits for other tasks of its array, which already runs as many at once "
    "as it may",
    "Licenses": "waits for a license",
    "NodeDown": "waits for a node that is down",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "Nodes required for job are DOWN": "waits for nodes that are down, drained or reserved",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "AccountNotAllowed": "its partition does not allow its account",
    "QOSNotAllowed": "its partition or account does not allow its QOS",
    "PartitionConfig": "requests something that its partition does not allow",
    "PartitionDown": "its partition is down: it accepts jobs, but starts none",
    "PartitionInactive": "its partition starts no jobs at the moment",
    "PartitionNodeLimit": "requests more nodes than its partition allows, or too few of them are "
    "up",
    "PartitionTimeLimit": "requests more time than its partition allows",
    "BadConstraints": "no node has everything that it requests",
    "AssociationJobLimit": "your account is already running as many jobs as it may",
    "AssociationResourceLimit": "your account is already using all the resources that it may",
    "AssociationTimeLimit": "your account has used all of its time",
    "JobHeldUser": "held by you",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held, because Slurm has requeued it as often as it may",
    "launch failed requeued held": "held, because Slurm could not launch it",
}

# Limits such as QOSMaxGRESPerUser, AssocGrpCPUMinutesLimit or MaxNodePerAccount.
_LIMIT = re.compile(r"(QOS|Assoc)?(Grp|Max|Min)\w+")


def explain_reason(reason: str, *, gpus: bool) -> str:
    """Return why a job waits, from Slurm's reason for it."""
    what = "GPUs" if gpus else "nodes"
    known = REASONS.get(reason) or next(
        (text for name, text in REASONS.items() if reason.startswith(f"{name},")), None
    )
    if known is None and (limit := _LIMIT.fullmatch(reason)):
        return f"a limit of {'your account' if limit[1] == 'Assoc' else 'its QOS'}: {reason}"
    if known is None:
        return reason
    nodes = re.search(r"UnavailableNodes:(\S+)", reason)
    return known.format(what=what) + (f" ({nodes[1]})" if nodes else "")


def expected_start(state: JobState, now: float) -> float | None:
    """Return when Slurm expects a job to start, in seconds since 1970; None if it does not say, or
    if that is past.
    """
    start = origin.parse_time(state.start)
    return start if start is not None and start > now else None


def show_start(start: float, now: float) -> str:
    """Return a time to come as people say it: 14:20, Tue 14:20 or 24 Nov 14:20."""
    then = time.localtime(start)
    if then[:3] == time.localtime(now)[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if start - now < 6 * 86400 else "%d %b %H:%M", then)
