"""The heartbeat file of a node: its layout, the states of a rank, and how it records the end of
its script.
"""

from __future__ import annotations

import atexit
import os
import struct
from contextlib import suppress

# Each node has one file, in memory (/dev/shm or the temporary folder), mapped by the agent and the
# ranks: a header that the agent writes, then one slot per local rank that only this rank writes. A
# heartbeat costs no system call, and a rank that is stuck in C code cannot pretend to be alive.

HEADER = struct.Struct("=qqq")  # terminating (1: TERM means "exit"), attempt, stop requested (1)
# after the header: the signal that ranks give themselves at a common step
STEP_SIGNAL = struct.Struct("=q")
# state, step, pid, time of the heartbeat (time.time()), seconds per step
SLOT = struct.Struct("=qqqdd")
SLOT_SIZE = 128

# States of a rank, in the order in which they happen.
ABSENT, READY, RUNNING, SAVED_AND_STOPPED, FINISHED = range(5)


class SlotField(struct.Struct):
    """A further field of a rank's slot, after another one."""

    def __init__(self, format: str, *, after: struct.Struct) -> None:
        super().__init__(format)
        self.start = getattr(after, "start", 0) + after.size

    def __new__(cls, format: str, *, after: struct.Struct) -> SlotField:
        return super().__new__(cls, format)  # type: ignore[call-arg]

    def offset(self, local_rank: int) -> int:
        """Return where the field of a local rank begins."""
        return slot_offset(local_rank) + self.start


def slot_offset(local_rank: int) -> int:
    """Return where the slot of a local rank begins; that of the number of ranks is the end of the
    file.
    """
    return SLOT_SIZE * (local_rank + 1)


# 1 once the script has ended normally, its threads and exit handlers included: only the process is
# still to exit.
SCRIPT_ENDED = SlotField("=q", after=SLOT)

# On rank 0, once its last state could not be saved: the step of that state, plus 1.
UNSAVED = SlotField("=q", after=SCRIPT_ENDED)

# The framework that the rank has imported: its place in `PRESETS`, plus 1. Only the rank's
# bootstrap writes it.
FRAMEWORK = SlotField("=q", after=UNSAVED)

# How a rank spends its time, as of the last consensus: seconds that it has waited for data since
# its first step, and seconds of a step before it exchanges gradients; 0 while unknown.
TIMES = SlotField("=dd", after=FRAMEWORK)

# 1 once the rank has opened a session: its script uses the runtime, wherever it imports it.
IN_SESSION = SlotField("=q", after=TIMES)

# Whether the rank gives itself the signal of `STEP_SIGNAL` after an optimizer step: not yet; it
# will; it has.
AT_STEPS = SlotField("=q", after=IN_SESSION)
_, TAKES_SIGNALS, SIGNALLED = range(3)

# 1 as long as the rank writes its stacks on SIGUSR2; the script may take the signal for itself.
WRITES_STACKS = SlotField("=q", after=AT_STEPS)

_FIELDS = (SLOT, SCRIPT_ENDED, UNSAVED, FRAMEWORK, TIMES, IN_SESSION, AT_STEPS, WRITES_STACKS)
WHOLE_SLOT = struct.Struct("=" + "".join(each.format.removeprefix("=") for each in _FIELDS))


class ScriptEnd:
    """Writes `SCRIPT_ENDED` at exit if `is_normal` is set by then.

    Create it before the script runs: exit handlers run in reverse order, and the script's own may
    still be at work.
    """

    def __init__(self, path: str, local_rank: int) -> None:
        self.is_normal = False
        self._path, self._offset, self._pid = path, SCRIPT_ENDED.offset(local_rank), os.getpid()
        atexit.register(self._write)

    def _write(self) -> None:
        if not self.is_normal or os.getpid() != self._pid:  # a process that the script has forked
            return
        with suppress(OSError), open(self._path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), SCRIPT_ENDED.pack(1), self._offset)
