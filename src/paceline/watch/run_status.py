"""The status of a run: from its folder, what Slurm says of its job, and who has the run folder.

Slurm may take a dead job for a running one for half an hour: after a node has restarted so quickly
that it never counted as down, and above all if the controller restarts too. So a job also has to
give a sign of life: its agents write to the run folder.
"""

from __future__ import annotations

import os

from paceline.contract import claims
from paceline.contract.claims import Holder, find_holder
from paceline.contract.foreign_records import NUMBER, read_fields, read_text
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, DONE_UNSAVED, FAILED, STOPPED, read_verdict
from paceline.slurm.job_states import LIVE, UNKNOWN, WAITING, JobState
from paceline.slurm.job_states import STATES as SLURM_STATES
from paceline.spec.quantities import parse_seconds
from paceline.watch import origin
from paceline.watch.events import newest_change

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
