"""The heartbeats of ranks.

The agent creates, reads and removes the heartbeat file of its node; ranks write their own slots.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files import make_own_folder, open_own_file
from paceline.contract.frameworks import PRESETS, Preset
from paceline.contract.heartbeat_file import (
    FRAMEWORK,
    HEADER,
    READY,
    SLOT,
    STEP_SIGNAL,
    WHOLE_SLOT,
    slot_offset,
)

PREFIX = "heartbeat-"
MEMORY = "/dev/shm"
MIN_AGE = 60.0  # seconds; a younger file may belong to an agent that has not locked it yet


@dataclass(frozen=True)
class Heartbeat:
    """What a rank has written into its slot; see `contract.heartbeat_file`."""

    local_rank: int
    state: int
    step: int
    pid: int
    time: float
    seconds_per_step: float
    script_ended: int = 0  # nothing of its script is left to run; its process may still exist
    unsaved_step: int = 0  # of its last state, plus 1, if that could not be saved
    framework: int = 0
    seconds_waited: float = 0.0  # for data
    own_seconds: float = 0.0  # of a step
    in_session: int = 0  # it has opened a session of the runtime
    at_steps: int = 0
    writes_stacks: int = 0  # on SIGUSR2; otherwise the signal belongs to the script

    @property
    def preset(self) -> Preset | None:
        """The preset of the framework that the rank has imported."""
        return PRESETS[self.framework - 1] if self.framework else None


class Heartbeats:
    """Memory shared with the ranks of this node."""

    def __init__(self, ranks: int) -> None:
        # Open and locked as long as this agent lives: that is how other agents know that it does.
        self._descriptor, self.path = _create_somewhere(slot_offset(ranks))
        self._map = mmap.mmap(self._descriptor, slot_offset(ranks))
        self.ranks = ranks

    def reset(self, attempt: int) -> None:
        """Clear all slots and requests for a new attempt."""
        self._map[:] = bytes(slot_offset(self.ranks))
        HEADER.pack_into(self._map, 0, 0, attempt, 0)

    def request_stop(self) -> None:
        """Reach ranks that start too late for the signal."""
        terminating, attempt, _ = HEADER.unpack_from(self._map)
        HEADER.pack_into(self._map, 0, terminating, attempt, 1)

    def signal_at_common_step(self, number: int) -> None:
        """Let the ranks that can give themselves a signal after the same optimizer step."""
        STEP_SIGNAL.pack_into(self._map, HEADER.size, number)

    def mark_terminating(self) -> None:
        """From now on SIGTERM ends a rank; it is no longer a request to save and stop."""
        _, attempt, stop = HEADER.unpack_from(self._map)
        HEADER.pack_into(self._map, 0, 1, attempt, stop)

    def read(self, local_rank: int) -> Heartbeat:
        return _read(self._map, local_rank)

    def read_all(self) -> list[Heartbeat]:
        return [self.read(local_rank) for local_rank in range(self.ranks)]

    def remove(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        with suppress(OSError):  # other agents use it
            self.path.parent.rmdir()


def _create_somewhere(size: int) -> tuple[int, Path]:
    """Create a file in shared memory, or in the temporary folder if the memory is full or missing.

    Its space is reserved: a process that writes to a file in full memory is ended by SIGBUS.
    """
    if os.access(MEMORY, os.W_OK):
        with suppress(OSError):
            return _create(MEMORY, size)
    return _create(tempfile.gettempdir(), size)


def _create(memory: str, size: int) -> tuple[int, Path]:
    """Create a file in our own folder of the memory that all users share."""
    while True:
        folder = make_own_folder(memory)
        _remove_abandoned(folder)
        with suppress(FileNotFoundError):  # another agent has just removed the empty folder
            descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
            break
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor, Path(path)


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of killed agents. Process ids would not identify them: containers have
    their own.
    """
    for path in folder.glob(PREFIX + "*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime < MIN_AGE:
                continue
            with open(open_own_file(path), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def read_file(path: Path, local_rank: int) -> Heartbeat:
    """Return a rank's slot from the file of another agent. Raises OSError or ValueError if it is
    gone.
    """
    try:
        return _read(path.read_bytes(), local_rank)
    except struct.error as error:
        raise ValueError(str(error)) from None


def _read(content: bytes | mmap.mmap, local_rank: int) -> Heartbeat:
    return Heartbeat(local_rank, *WHOLE_SLOT.unpack_from(content, slot_offset(local_rank)))


def mark_ready(path: str, local_rank: int) -> None:
    """Tell the agent that this rank can take signals. Called by the rank's bootstrap."""
    write_state(path, local_rank=local_rank, state=READY)


def write_state(path: str, *, local_rank: int, state: int) -> None:
    """Write a rank's state from its bootstrap, and keep the step that the runtime wrote."""
    offset = slot_offset(local_rank)
    with suppress(OSError), open(path, "r+b", buffering=0) as file:  # without it, the agent is gone
        _, step, _, _, seconds = SLOT.unpack(os.pread(file.fileno(), SLOT.size, offset))
        os.pwrite(file.fileno(), SLOT.pack(state, step, os.getpid(), time.time(), seconds), offset)


def write_framework(path: str, *, local_rank: int, number: int) -> None:
    """Write which framework a rank has imported; the first in `PRESETS` counts."""
    offset = FRAMEWORK.offset(local_rank)
    with suppress(OSError), open(path, "r+b", buffering=0) as file:
        known: int = FRAMEWORK.unpack(os.pread(file.fileno(), FRAMEWORK.size, offset))[0]
        if not 0 < known <= number:
            os.pwrite(file.fileno(), FRAMEWORK.pack(number), offset)


def is_ended(path: str) -> bool:
    """Whether the agent is ending its ranks, or has asked them to stop."""
    with suppress(OSError), open(path, "rb") as file:
        terminating, _, stop_requested = HEADER.unpack(file.read(HEADER.size))
        return bool(terminating or stop_requested)
    return True  # the agent is gone


def read_step(path: str, local_rank: int) -> int:
    """Return the step that a rank has reached, for its error report."""
    try:
        return read_file(Path(path), local_rank).step
    except (OSError, ValueError):
        return 0
