"""A rank's heartbeat: its slot in the node's heartbeat file, written at step boundaries without a
system call.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from paceline.contract.heartbeat_file import (
    ABSENT,
    HEADER,
    IN_SESSION,
    SLOT,
    TIMES,
    UNSAVED,
    slot_offset,
)


class Heartbeat:
    """Writes this rank's slot and reads the agent's header. Without a heartbeat file, every call
    does nothing.
    """

    def __init__(self, path: str | None, local_rank: int) -> None:
        self.state = ABSENT
        self.step = 0
        self.seconds_per_step = 0.0
        self._pid = os.getpid()
        self._offset = slot_offset(local_rank)
        self._local_rank = local_rank
        self._map: mmap.mmap | None = None
        if path and Path(path).exists():
            with open(path, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
            if len(mapped) >= TIMES.offset(local_rank) + TIMES.size:
                self._map = mapped

    @property
    def is_on(self) -> bool:
        return self._map is not None

    @property
    def is_ending(self) -> bool:
        """Whether the agent is ending its ranks: SIGTERM then means exit, not save and stop."""
        return self._map is not None and bool(HEADER.unpack_from(self._map, 0)[0])

    @property
    def stop_requested(self) -> bool:
        """Whether the agent has asked for a stop, perhaps before this rank installed its signal
        handlers.
        """
        return self._map is not None and bool(HEADER.unpack_from(self._map, 0)[2])

    def write(self, step: int) -> None:
        """Write one heartbeat at a step boundary."""
        self.step = step
        if self._map is not None:
            SLOT.pack_into(
                self._map,
                self._offset,
                self.state,
                step,
                self._pid,
                time.time(),
                self.seconds_per_step,
            )

    def set_state(self, state: int) -> None:
        """Enter a state and write it. Within one process, states only move forward."""
        self.state = state
        self.write(self.step)

    def write_times(self, waited: float, own: float) -> None:
        """Write how long this rank has waited for data so far, and the seconds of a step that are
        its own.
        """
        if self._map is not None:
            TIMES.pack_into(self._map, TIMES.offset(self._local_rank), waited, own)

    def mark_session(self) -> None:
        """Tell the agent that this rank has opened a session: its script will have step
        boundaries.
        """
        if self._map is not None:
            IN_SESSION.pack_into(self._map, IN_SESSION.offset(self._local_rank), 1)

    def mark_unsaved(self, step: int) -> None:
        """Tell the agent that the last state could not be saved. It takes no space on a disk,
        which may be full.
        """
        if self._map is not None:
            UNSAVED.pack_into(self._map, UNSAVED.offset(self._local_rank), step + 1)

    def close(self) -> None:
        mapped, self._map = self._map, None
        if mapped is not None:
            mapped.close()
