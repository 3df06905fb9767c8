"""A thread that hands lines of `metrics.jsonl` to a tracker, so that the training never waits for one.

Each tracker has a feed of its own: one that hangs does not keep the others waiting. What is waiting is bounded; a
tracker that is too slow for the training loses lines, and says so. `metrics.jsonl` has them all.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

from paceline.contract.jsonl import LineWriter
from paceline.contract.verdict import FAILED, STOPPED
from paceline.runtime.trackers.base import RunInfo, Tracker, first_line, warn

MOST_WAITING = 100_000  # lines
PATIENCE = 30.0  # seconds in which a tracker has to finish after the training
PATIENCE_AT_A_STOP = 15.0  # out of the grace that a job has
PATIENCE_AFTER_ERROR = 5.0  # a rank that has failed keeps its peers waiting
URGENT = 0.5  # the job is being killed: nothing may come between the ranks and their verdict
LETTING_GO = 0.3
WORDS_OF_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Feed:
    """One tracker and its thread. `append` takes whole lines of JSON, as `LineWriter.append` does."""

    def __init__(self, name: str, tracker: Tracker, info: RunInfo) -> None:
        self.name = name
        self.tracker = tracker
        self.started = threading.Event()  # or failed to
        self._info = info
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._given = 0  # lines, counted by the training
        self._taken = 0  # lines, counted by the thread
        self._lost = 0
        self._status = FAILED
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def append(self, text: str) -> None:
        count = text.count("\n")
        if self._broken:
            return
        if self._given - self._taken + count > MOST_WAITING:
            if not self._lost:
                warn(f"{self.name} is slower than the training and loses values; metrics.jsonl has them all")
            self._lost += count
            return
        self._given += count
        self._queue.put(text)

    def end(self, status: str) -> None:
        """No more lines: the tracker may finish."""
        self._status = status
        self._queue.put(None)

    def wait(self, until: float, *, patience: float) -> None:
        """Until it has finished; leave it behind when that moment has come."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if not self._thread.is_alive():
            return
        waiting = self._given - self._taken
        told = f", {waiting} lines wait" if waiting else ""
        warn(f"{self.name} did not finish within {patience:g} s{told}: it is left behind")
        self._broken = True
        abandon = getattr(self.tracker, "abandon", None)
        if abandon is not None:
            abandon()
            self._thread.join(LETTING_GO)

    # -- the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        # Signals are the main thread's, and what this one starts (a tracker's service) inherits the mask.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
        try:
            self.tracker.start(self._info)
            self.started.set()
            while (text := self._queue.get()) is not None:
                for line in text.splitlines():
                    if self._broken:
                        return
                    step, values = record(line)
                    if values:
                        self.tracker.log(step, values)
                    self._taken += 1
            self.tracker.finish(self._status)
        except BaseException as error:
            if not self._broken:
                kind = type(error).__name__
                warn(f"{self.name} gets no more values: {kind}: {first_line(error)}; metrics.jsonl goes on")
        finally:
            self._broken = True
            self.started.set()


def patience_for(status: str, *, urgent: bool) -> float:
    """Seconds that trackers have at the end, all together."""
    if urgent:
        return URGENT
    return {FAILED: PATIENCE_AFTER_ERROR, STOPPED: PATIENCE_AT_A_STOP}.get(status, PATIENCE)


class Tee(LineWriter):
    """A file of lines that feeds read, too."""

    def __init__(self, path: Path | None, feeds: list[Feed]) -> None:
        super().__init__(path)
        self._feeds = feeds

    def append(self, text: str) -> None:
        super().append(text)
        if text:
            for feed in self._feeds:
                feed.append(text)


def record(line: str) -> tuple[int, dict[str, float | str]]:
    """A line as trackers want it: its step and flat values, with the numbers that JSON has no words for."""
    table: dict[str, Any] = json.loads(line)
    step = int(table.pop("step", 0))
    return step, dict(_flat(table))


def _flat(table: dict[str, Any], above: str = "") -> list[tuple[str, float | str]]:
    found: list[tuple[str, float | str]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{above}{name}/")
        elif isinstance(value, str):
            found.append((f"{above}{name}", WORDS_OF_NUMBERS.get(value, value)))
        elif isinstance(value, (int, float)):
            found.append((f"{above}{name}", value))
    return found
