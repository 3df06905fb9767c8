"""The thread that passes lines of `metrics.jsonl` to a tracker, so that training never waits for
one.

Each tracker has its own thread: one that hangs doesn't delay the others. The queue is bounded; a
tracker that can't keep up loses lines, with a warning. `metrics.jsonl` has them all.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.contract.verdict import FAILED, STOPPED
from paceline.runtime.console import note
from paceline.runtime.trackers.base import RunInfo, Tracker, first_line

MAX_WAITING = 100_000  # lines
# Seconds for all trackers together to finish after training.
FINISH_TIMEOUT = 30.0
FINISH_TIMEOUT_AT_STOP = 15.0  # taken out of the job's grace period
FINISH_TIMEOUT_AFTER_ERROR = 5.0  # the other ranks wait for a rank that failed
FINISH_TIMEOUT_URGENT = 0.5  # the job is being killed, and the verdict must still be written
ABANDON_TIMEOUT = 0.3
SPECIAL_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class TrackerThread:
    """One tracker and its thread. `append` takes whole lines of JSON, as `LineWriter.append`
    does.
    """

    def __init__(self, name: str, tracker: Tracker, info: RunInfo) -> None:
        self.name = name
        self.tracker = tracker
        self.started = threading.Event()  # also set if the start failed
        self._info = info
        self._queue: queue.SimpleQueue[str | Callable[[], None] | None] = queue.SimpleQueue()
        self._put = 0  # lines, counted by the training thread
        self._taken = 0  # lines, counted by the tracker's thread
        self._lost = 0
        self._status = FAILED
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def append(self, text: str) -> None:
        count = text.count("\n")
        if self._broken:
            return
        if self._put - self._taken + count > MAX_WAITING:
            if not self._lost:
                note(
                    f"{self.name} can't keep up with training and loses values; metrics.jsonl has "
                    "them all"
                )
            self._lost += count
            return
        self._put += count
        self._queue.put(text)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, after the lines so far."""
        self._queue.put(function)

    def finish(self, status: str) -> None:
        """Let the tracker finish once it has taken all lines."""
        self._status = status
        self._queue.put(None)

    def join(self, deadline: float, *, timeout: float) -> None:
        """Wait for the tracker to finish, and abandon it at the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        waiting = self._put - self._taken
        lines = f", with {waiting} lines waiting" if waiting else ""
        note(f"{self.name} did not finish within {timeout:g} s{lines}: giving up on it")
        self._broken = True
        abandon = getattr(self.tracker, "abandon", None)
        if abandon is not None:
            abandon()
            self._thread.join(ABANDON_TIMEOUT)

    # -- in the thread
    # ---------------------------------------------------------------------------------

    def _work(self) -> None:
        # Signals go to the main thread. Whatever this thread starts (a tracker's service) inherits
        # the mask.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(
                signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
            )
        try:
            self.tracker.start(self._info)
            self.started.set()
            while (text := self._queue.get()) is not None:
                if not isinstance(text, str):
                    text()
                    continue
                for line in text.splitlines():
                    if self._broken:
                        return
                    step, values = parse_line(line)
                    if values:
                        self.tracker.log(step, values)
                    self._taken += 1
            self.tracker.finish(self._status)
        except BaseException as error:
            if not self._broken:
                kind = type(error).__name__
                note(
                    f"{self.name} gets no more values: {kind}: {first_line(error)}; metrics.jsonl "
                    "continues"
                )
        finally:
            self._broken = True
            self.started.set()


def finish_timeout(status: str, *, urgent: bool) -> float:
    """Return how many seconds all trackers together have to finish."""
    if urgent:
        return FINISH_TIMEOUT_URGENT
    return {FAILED: FINISH_TIMEOUT_AFTER_ERROR, STOPPED: FINISH_TIMEOUT_AT_STOP}.get(
        status, FINISH_TIMEOUT
    )


def parse_line(line: str) -> tuple[int, dict[str, float | str]]:
    """Return a line's step and its values, with nested tables flattened and nan and inf as
    numbers.
    """
    table: dict[str, Any] = json.loads(line)
    step = int(table.pop("step", 0))
    return step, dict(_flatten(table))


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, float | str]]:
    found: list[tuple[str, float | str]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, str):
            found.append((f"{prefix}{name}", SPECIAL_NUMBERS.get(value, value)))
        elif isinstance(value, (int, float)):
            found.append((f"{prefix}{name}", value))
    return found
