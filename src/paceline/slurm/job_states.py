"""Slurm's job states, and what they mean for a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

WAITING, LIVE, ENDED, UNKNOWN = "waiting", "live", "ended", "unknown"

# Slurm's state -> (label shown to the user, phase), for Slurm 22.05 to 25.
STATES: dict[str, tuple[str, str]] = {
    "PENDING": ("queued", WAITING),
    "REQUEUED": ("queued", WAITING),
    "REQUEUE_HOLD": ("held", WAITING),
    "REQUEUE_FED": ("queued", WAITING),
    "RESV_DEL_HOLD": ("held", WAITING),
    "SPECIAL_EXIT": ("held", WAITING),
    "CONFIGURING": ("starting", WAITING),
    "POWER_UP_NODE": ("starting", WAITING),
    "RUNNING": ("running", LIVE),
    "RESIZING": ("running", LIVE),
    "SIGNALING": ("running", LIVE),
    "STAGE_OUT": ("ending", LIVE),
    "COMPLETING": ("ending", LIVE),
    "SUSPENDED": ("suspended", LIVE),
    "STOPPED": ("suspended", LIVE),
    "COMPLETED": ("done", ENDED),
    "CANCELLED": ("cancelled", ENDED),
    "FAILED": ("failed", ENDED),
    "TIMEOUT": ("timed out", ENDED),
    "NODE_FAIL": ("node failed", ENDED),
    "PREEMPTED": ("preempted", ENDED),
    "OUT_OF_MEMORY": ("out of memory", ENDED),
    "BOOT_FAIL": ("node failed", ENDED),
    "DEADLINE": ("timed out", ENDED),
    "LAUNCH_FAILED": ("failed", ENDED),
    "RECONFIG_FAIL": ("failed", ENDED),
    "REVOKED": ("revoked", ENDED),
}


@dataclass(frozen=True)
class JobState:
    """A job as the scheduler reports it."""

    id: str
    state: str  # Slurm's name for it
    reason: str = ""
    nodes: str = ""
    start: str = ""  # actual or expected start time
    elapsed: str = ""
    exit_code: str = ""

    @property
    def label(self) -> str:
        """The state as shown to the user; an unknown one is shown as Slurm names it."""
        return STATES.get(self.state, (self.state.lower(), UNKNOWN))[0]

    @property
    def phase(self) -> str:
        return STATES.get(self.state, ("", UNKNOWN))[1]

    @property
    def was_killed(self) -> bool:
        """Whether the batch shell ended by a signal: Slurm then fails the job and ends its steps.

        The shell exits on its own with a code, whatever becomes of the run.
        """
        by_signal = re.fullmatch(r"\d+:[1-9]\d*", self.exit_code)
        reasons = ("RaisedSignal", "JobLaunchFailure")  # the second in some versions, after hours
        return self.state == "FAILED" and bool(by_signal or self.reason.startswith(reasons))


def normalize_state(text: str) -> str:
    """Strip what Slurm adds to a state: `CANCELLED by 1000` -> `CANCELLED`, `RUNNING+` ->
    `RUNNING`.
    """
    return text.split(maxsplit=1)[0].rstrip("+").upper() if text.strip() else ""
