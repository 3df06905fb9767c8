"""Stopping together: a signal sets a flag, an agreement carries it to all ranks, all stop at the same boundary.

Nothing is saved inside a signal handler. One asynchronous MAX reduction at a time travels on the control group:
it is launched at one step boundary and harvested at a later one that all ranks know, because the number of steps
between follows from the step time that the previous reduction agreed on. So no rank ever waits for it, and no
rank can decide otherwise than its peers.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from paceline.runtime.boundary.heartbeat import Heartbeat

INTERVAL = 0.4  # seconds from launch to harvest: one small reduction in that time is far below 0.1 %
SLOW_STEP = 2.0  # from here on an agreement is harvested where it is launched: waiting a step would cost more

# What is reduced, by position. MAX over ranks; a minimum is the maximum of the negative.
STOP, SAVE, SECONDS, SCHEMA, MINUS_SCHEMA, MINUS_BAD_STEP = range(6)
SIZE = 6
NOTHING_BAD = -math.inf


class Stopped(BaseException):
    """Ends the training loop from within `run.steps`; the session turns it into a clean exit.

    Not an Exception: a script's `except Exception` around its step must not swallow it.
    """


class Pruned(Stopped):
    """Ends the body of a session because the trial is not worth going on: its run is done, and nothing resumes it."""


class StopSignals:
    """SIGUSR1 and SIGTERM as requests to stop, for as long as a session lives."""

    def __init__(self, heartbeat: Heartbeat, notify: Callable[[], None]) -> None:
        self.asked = False
        self.is_urgent = False  # a scheduler's SIGTERM: its SIGKILL is seconds away
        self._heartbeat = heartbeat
        self._notify = notify
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; a session in another thread is stopped by its peers' word
        for name in ("SIGUSR1", "SIGTERM"):
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._on_signal)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._heartbeat.ending:
            # The agent ends its ranks because one has failed: that is not a request to save and stop.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.asked = True
        self.is_urgent |= number == signal.SIGTERM
        self._notify()


class StopConsensus:
    """The reduction that is under way. `due` is the tick at which it is harvested, the same on all ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.tick = 0
        self.due = 0
        self.seconds = 0.0  # per tick, as last agreed
        self._sent = torch.zeros(SIZE, dtype=torch.float64)
        self._work: Any = None
        self._since = time.perf_counter()
        self._ticked = 0
        self._is_first = True  # of a loop

    def hurry(self) -> None:
        """Alone there is nobody to wait for: the next boundary decides."""
        if self.group is None:
            self.due = 0

    def begin_loop(self) -> None:
        """Time that passed outside the loop is nobody's step time, and a loop has a pace of its own.

        So its first boundary decides at once: after steps of a millisecond, an evaluation of slow batches must not
        wait for hundreds of them.
        """
        self._since, self._ticked = time.perf_counter(), self.tick
        self.due = self.tick + 1
        self._is_first = True

    def launch(self, words: list[float]) -> float:
        """Send this rank's words; its own step time is added here, and returned."""
        now = time.perf_counter()
        if self.tick > self._ticked:
            words[SECONDS] = (now - self._since) / (self.tick - self._ticked)
            self._since, self._ticked = now, self.tick
        else:
            words[SECONDS] = self.seconds
        self._sent = torch.tensor(words, dtype=torch.float64)
        if self.group is not None:
            self._work = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        return words[SECONDS]

    def harvest(self) -> list[float]:
        """What all ranks agreed on. Usually it has long arrived."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        agreed: list[float] = self._sent.tolist()
        self.seconds = agreed[SECONDS]
        return agreed

    def any_rank(self, mine: bool) -> bool:
        """A question that all ranks ask at the same place, and wait for."""
        if self.group is None:
            return mine
        word = torch.tensor(int(mine))
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self.group)
        return bool(word)

    @property
    def under_way(self) -> bool:
        return self._work is not None

    @property
    def at_once(self) -> bool:
        """Whether the next agreement is harvested where it is launched."""
        return self.group is None or self._is_first or self.seconds <= 0 or self.seconds >= SLOW_STEP

    def schedule(self) -> None:
        """Set the next tick at which ranks meet."""
        self._is_first = False
        steps = 1 if self.seconds <= 0 else max(1, min(100_000, round(INTERVAL / self.seconds)))
        self.due = self.tick + steps
