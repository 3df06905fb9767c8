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
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import LineWriter
from paceline.contract.run_folder import DONE, FAILED, STOPPED
from paceline.runtime.console import note
from paceline.runtime.trackers.base import RunInfo, Tracker, first_line

MAX_WAITING = 100_000  # batches of lines, a few of which are written in a second
# Seconds for all trackers together to finish after training. At a stop, they are taken out of the
# job's grace period; after an error, the other ranks wait.
FINISH_TIMEOUTS = {DONE: 30.0, STOPPED: 15.0, FAILED: 5.0}
URGENT_FINISH_TIMEOUT = 0.5  # the job is being killed, and the verdict must still be written
SPECIAL_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class TrackerThread:
    """One tracker and its thread. `append` takes whole lines of JSON, as `LineWriter.append`
    does.
    """

    def __init__(self, name: str, tracker: Tracker, info: RunInfo) -> None:
        self.started = threading.Event()  # also set if the start failed
        self.tracker: Any = tracker
        self._name, self._info = name, info
        self._queue: queue.SimpleQueue[str | dict[str, Any] | None] = queue.SimpleQueue()
        self._is_behind = False
        self._status = FAILED
        self._broken = False
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def append(self, text: str) -> None:
        if self._broken:
            return
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put(text)
        elif not self._is_behind:
            self._is_behind = True
            note(
                f"{self._name} can't keep up with training and loses values; metrics.jsonl has "
                "them all"
            )

    def configure(self, values: dict[str, Any]) -> None:
        """Pass on the script's own settings, after the lines so far."""
        self._queue.put(values)

    def finish(self, status: str) -> None:
        """Let the tracker finish once it has taken all lines."""
        self._status = status
        self._queue.put(None)

    def join(self, deadline: float, *, timeout: float) -> None:
        """Wait for the tracker to finish, and give up on it at the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            note(f"{self._name} did not finish within {timeout:g} s: giving up on it")
            self._broken = True

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
                if isinstance(text, dict):
                    self.tracker.configure(text)
                    continue
                for line in text.splitlines():
                    if self._broken:
                        return
                    self.tracker.log(*parse_line(line))
            self.tracker.finish(self._status)
        except BaseException as error:
            if not self._broken:
                kind = type(error).__name__
                note(
                    f"{self._name} gets no more values: {kind}: {first_line(error)}; metrics.jsonl "
                    "continues"
                )
        finally:
            self._broken = True
            self.started.set()


class ForwardedMetrics(LineWriter):
    """metrics.jsonl, which rank 0 writes, and whose lines also go to trackers."""

    def __init__(self, path: Path | None, threads: list[TrackerThread]) -> None:
        super().__init__(path)
        self._threads = threads

    def append(self, text: str) -> bool:
        written = super().append(text)
        for thread in self._threads:
            thread.append(text)
        return written


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
