"""The status of a run: from its folder, what Slurm says of its job, and who has the run folder."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from paceline.contract import claims
from paceline.contract.claims import Holder, find_holder
from paceline.contract.foreign_records import read_bounded
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, DONE_UNSAVED, FAILED, STOPPED, read_verdict
from paceline.slurm.job_states import LIVE, UNKNOWN, WAITING, JobState
from paceline.slurm.job_states import STATES as SLURM_STATES

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
    with suppress(OSError, ValueError):
        return read_bounded(f"{holder.path}/unsaved", 10_000).decode().strip() if holder else ""
    return ""


def killed_shell(folder: RunFolder, state: JobState | None) -> str:
    """Return that the job's batch shell was killed; empty if it was not, or if nobody can know.

    The shell exits on its own with a code, whatever becomes of the run. Slurm fails a job whose
    shell ends by a signal, and ends its steps. Some versions call that a launch failure, also after
    hours.
    """
    if state is None or state.state != "FAILED":
        return ""
    holder = find_holder(folder)
    if holder is None or not holder.job_start.agent.exists():
        return ""
    number = re.match(r"RaisedSignal:(\d+)", state.reason) or re.fullmatch(
        r"\d+:([1-9]\d*)", state.exit_code
    )
    if number is None and state.reason != "JobLaunchFailure":
        return ""
    return f"the batch shell was killed{f' by signal {number[1]}' if number else ''}"
