"""What a rank does before its agent kills it because another rank has failed.

Python runs signal handlers in the main thread, between two of its instructions. A rank whose peer
has failed waits in a collective, and does not get there before it is killed. So a thread sleeps
until a signal arrives, and acts instead.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class PeerFailureWatch:
    """Calls a function once when the agent ends this process: from a thread, or from the signal
    handler.
    """

    def __init__(self, is_ending: Callable[[], bool], action: Callable[[], None]) -> None:
        self._is_ending = is_ending
        self._action = action
        self._is_done = False
        self._lock = threading.RLock()  # a signal may interrupt its own handler
        self._write_end: int | None = None

    def start(self) -> None:
        """Begin to watch, unless another library watches signals in this way. Only the main thread
        can.
        """
        if self._write_end is not None:
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            os.close(read_end)
            os.close(write_end)
            return
        self._write_end = write_end
        threading.Thread(
            target=self._watch, args=(read_end,), name="paceline-peer-failure", daemon=True
        ).start()

    def close(self) -> None:
        write_end, self._write_end = self._write_end, None
        if write_end is None:
            return
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, write_end):
            signal.set_wakeup_fd(current)
        os.close(write_end)  # which ends the thread

    def act(self) -> None:
        """Do what is to be done, or wait until the other thread has done it."""
        with self._lock:
            if not self._is_done:
                self._is_done = True
                self._action()

    def _watch(self, read_end: int) -> None:
        with open(read_end, "rb", buffering=0) as signals:
            while received := signals.read(64):
                if signal.SIGTERM in received and self._is_ending():
                    self.act()
