"""Stop all ranks at the same step: signals set a flag, and a reduction makes all ranks see it.

Nothing is saved inside a signal handler. One asynchronous MAX reduction at a time runs on the
control group. It is launched at one step boundary and collected at a later one. All ranks know
which: the number of steps in between follows from the step time that the previous reduction agreed
on. So no rank waits for it, and no rank can decide differently from its peers.
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

from paceline.contract.heartbeat_file import RUNNING
from paceline.runtime.step_boundary.heartbeat import Heartbeat

# seconds from launch to collection; one small reduction in that time costs far less than 0.1 %
INTERVAL = 0.4
# seconds; from here on a reduction is collected at once: a further step would cost more
SLOW_STEP = 2.0

# Positions of the reduced values. MAX over ranks; a minimum is the maximum of the negative.
(STOP, SAVE, SECONDS, SCHEMA, MINUS_SCHEMA, MINUS_BAD_STEP, BATCH, MINUS_BATCH) = range(8)
SIZE = 8
NO_BAD_STEP = -math.inf


class Stopped(SystemExit):
    """Ends the training loop from within `run.steps`, and the script: a clean exit, with code 0.

    Not an Exception: an `except Exception` in the script must not swallow it.
    """


class Completed(Stopped):
    """Ends a script that goes on asking for steps after `max_steps`: the run is done."""


class Pruned(Stopped):
    """Ends a trial that its sweep has given up: the run is done, and nothing resumes it."""


class StopSignals:
    """Treats SIGUSR1 and SIGTERM as requests to stop while a session is open.

    After Ctrl-C, the agent sends SIGINT to ranks that have not reached a step boundary: there is
    nothing to save yet. One that reaches it in that moment stops like the others.
    """

    def __init__(
        self, heartbeat: Heartbeat, notify: Callable[[], None], before_end: Callable[[], None]
    ) -> None:
        self.requested = False
        self.is_leaving = False  # this rank has failed itself: it writes what it has, and exits
        self.is_urgent = False  # a scheduler's SIGTERM: SIGKILL follows within seconds
        self._heartbeat = heartbeat
        self._notify = notify
        self._before_end = before_end  # called once if the agent ends this rank
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread can; a session in another thread stops when a peer does
        for name in ("SIGUSR1", "SIGTERM"):
            number = getattr(signal, name, None)
            if number is not None:
                self._previous[number] = signal.signal(number, self._on_signal)
        if self._heartbeat.is_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_interrupt)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._heartbeat.is_ending:
            # The agent ends its ranks because one has failed. That is not a request to save and
            # stop.
            if self.is_leaving:
                return
            self.is_leaving = True
            self._before_end()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._request(number)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._heartbeat.state < RUNNING or not self._heartbeat.stop_requested:
            raise KeyboardInterrupt
        self._request(number)

    def _request(self, number: int) -> None:
        self.requested = True
        self.is_urgent |= number == signal.SIGTERM
        self._notify()


class StopConsensus:
    """The reduction by which all ranks agree to stop or save.

    `tick` counts boundaries. `due` is the tick at which the reduction is collected; it is the same
    on all ranks.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.tick = 0
        self.due = 0
        self.seconds = 0.0  # per tick, as last agreed
        self._values = torch.zeros(SIZE, dtype=torch.float64)
        self._work: Any = None
        self._since = time.perf_counter()
        self._last_tick = 0
        self._is_first = True  # of a loop

    def expedite(self) -> None:
        """Decide at the next boundary if there are no other ranks to agree with."""
        if self.group is None:
            self.due = 0

    def begin_loop(self) -> None:
        """Decide at the first boundary of the loop, and measure the loop's own step time.

        After steps of a millisecond, an evaluation of slow batches must not wait for hundreds of
        them.
        """
        self._since, self._last_tick = time.perf_counter(), self.tick
        self.due = self.tick + 1
        self._is_first = True

    def launch(self, values: list[float]) -> float:
        """Start reducing this rank's values. Adds its own step time, and returns it."""
        now = time.perf_counter()
        if self.tick > self._last_tick:
            values[SECONDS] = (now - self._since) / (self.tick - self._last_tick)
            self._since, self._last_tick = now, self.tick
        else:
            values[SECONDS] = self.seconds
        self._values = torch.tensor(values, dtype=torch.float64)
        if self.group is not None:
            self._work = dist.all_reduce(
                self._values, op=dist.ReduceOp.MAX, group=self.group, async_op=True
            )
        return values[SECONDS]

    def collect(self) -> list[float]:
        """Return the reduced values. They have usually arrived long ago."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        reduced: list[float] = self._values.tolist()
        self.seconds = reduced[SECONDS]
        return reduced

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Blocks; all ranks call it at the same
        point.
        """
        if self.group is None:
            return flag
        reduced = torch.tensor(int(flag))
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=self.group)
        return bool(reduced)

    @property
    def in_flight(self) -> bool:
        return self._work is not None

    @property
    def is_synchronous(self) -> bool:
        """Whether the next reduction is collected where it is launched."""
        return (
            self.group is None or self._is_first or self.seconds <= 0 or self.seconds >= SLOW_STEP
        )

    def schedule(self) -> None:
        """Set the tick at which the ranks agree next."""
        self._is_first = False
        steps = 1 if self.seconds <= 0 else max(1, min(100_000, round(INTERVAL / self.seconds)))
        self.due = self.tick + steps
