"""What Slurm calls the states of a job, and what they mean to somebody who waits for a run."""

from __future__ import annotations

from dataclasses import dataclass

WAITING, LIVE, ENDED, UNKNOWN = "waiting", "live", "ended", "unknown"

# Slurm's word -> (what a person is told, the phase it belongs to). Slurm 22.05 to 25.
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
    """A job as the scheduler tells it."""

    id: str
    state: str  # Slurm's own word
    reason: str = ""
    nodes: str = ""
    start: str = ""  # when it began, or is expected to
    elapsed: str = ""
    exit_code: str = ""

    @property
    def label(self) -> str:
        """For people. A state that nobody foresaw is shown as Slurm writes it."""
        return STATES.get(self.state, (self.state.lower(), UNKNOWN))[0]

    @property
    def phase(self) -> str:
        return STATES.get(self.state, ("", UNKNOWN))[1]


def normalize_state(text: str) -> str:
    """`CANCELLED by 1000`, `RUNNING+` -> the word itself."""
    return text.split(maxsplit=1)[0].rstrip("+").upper() if text.strip() else ""
