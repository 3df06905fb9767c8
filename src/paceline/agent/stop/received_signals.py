"""Signals to an agent: handlers only count them here, and the agent's loop acts on them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

# Seconds within which two signals are one request: a scheduler signals several processes, which
# pass it on.
SAME_REQUEST = {"stop": 1.0, "interrupt": 0.2}


class Requests:
    """Counts what signals request. `fileno` becomes readable with each signal, including
    SIGCHLD.
    """

    def __init__(self) -> None:
        self.stop = 0  # save and stop: SIGTERM, SIGHUP, SIGUSR1
        self.by_term = False  # or by SIGHUP
        self.interrupt = 0  # Ctrl-C: save and stop; the second time, end now
        self._last = {"stop": -10.0, "interrupt": -10.0}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def listen(self) -> None:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(signum, self._count)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self._count)
        # a command may have held it back until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    @staticmethod
    def ignore() -> None:
        """Ignore signals from now on: while Python shuts down, they would end the process and
        change its exit code.
        """
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)

    @property
    def wants_stop(self) -> bool:
        return self.stop > 0 or self.interrupt > 0

    @property
    def end_now(self) -> bool:
        """Whether to kill at once: the user pressed Ctrl-C twice, or requested a stop twice."""
        return self.interrupt > 1 or self.stop > 1

    @property
    def cancels_start(self) -> bool:
        """Whether to give up before any rank runs: there is nothing to save."""
        return self.interrupt > 0 or self.stop > 1

    def fileno(self) -> int:
        return self._reader

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def _count(self, signum: int, _: FrameType | None) -> None:
        kind = "interrupt" if signum == signal.SIGINT else "stop"
        self.by_term |= signum in (signal.SIGTERM, signal.SIGHUP)
        now = time.monotonic()
        if now - self._last[kind] >= SAME_REQUEST[kind]:
            setattr(self, kind, getattr(self, kind) + 1)
        self._last[kind] = now
