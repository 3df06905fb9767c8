"""The beat file of a node, seen from its agent: made, read and removed here; ranks write their own slots."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.heartbeat_file import HEADER, READY, SLOT, file_size, slot_offset

PREFIX = "paceline-beat-"
YOUNG = 60.0  # seconds


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    local_rank: int
    state: int
    step: int
    pid: int
    time: float
    seconds_per_step: float


class Beats:
    """Shared memory with the ranks of this node."""

    def __init__(self, ranks: int) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        _remove_abandoned(Path(memory))
        # Held and locked for as long as this agent lives, which is how others tell that it does.
        self._descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=memory)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._descriptor, file_size(ranks))
        self._map = mmap.mmap(self._descriptor, file_size(ranks))
        self.path = Path(path)
        self.ranks = ranks

    def begin(self, attempt: int) -> None:
        """A new attempt: nobody is here yet, nothing has been asked."""
        self._map[:] = bytes(file_size(self.ranks))
        HEADER.pack_into(self._map, 0, 0, attempt, 0)

    def ask_to_stop(self) -> None:
        """For ranks that come too late for the signal."""
        ending, attempt, _ = HEADER.unpack_from(self._map)
        HEADER.pack_into(self._map, 0, ending, attempt, 1)

    def say_ending(self) -> None:
        """From now on SIGTERM means the end, not a request to save and stop."""
        _, attempt, stop = HEADER.unpack_from(self._map)
        HEADER.pack_into(self._map, 0, 1, attempt, stop)

    def read(self, local_rank: int) -> Beat:
        return Beat(local_rank, *SLOT.unpack_from(self._map, slot_offset(local_rank)))

    def remove(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Files of agents that were killed. Process numbers would not tell: containers have their own."""
    for path in folder.glob(PREFIX + "*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < YOUNG:
                continue  # its maker may not have come to lock it
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def say_ready(path: str, local_rank: int) -> None:
    """Called by a rank's bootstrap: signals may come now."""
    write_state(path, local_rank=local_rank, state=READY)


def write_state(path: str, *, local_rank: int, state: int) -> None:
    """Write a slot from the bootstrap; what the runtime wrote there (the step) stays."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return  # the agent is gone, and will have taken the ranks along
    try:
        offset = slot_offset(local_rank)
        _, step, _, _, seconds = SLOT.unpack(os.pread(descriptor, SLOT.size, offset))
        os.pwrite(descriptor, SLOT.pack(state, step, os.getpid(), time.time(), seconds), offset)
    finally:
        os.close(descriptor)


def read_step(path: str, local_rank: int) -> int:
    """The step that a rank has reached, for its error report."""
    try:
        with open(path, "rb") as file:
            file.seek(slot_offset(local_rank))
            step: int = SLOT.unpack(file.read(SLOT.size))[1]
            return step
    except (OSError, ValueError):
        return 0
