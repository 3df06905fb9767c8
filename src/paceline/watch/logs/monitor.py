"""Know when a run is over, and follow its output until then."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE
from paceline.watch.records import Record, newest_verdict, read_json, read_record

POLL_INTERVAL = 0.3  # seconds between reads of a file
QUERY_INTERVALS = (2.0, 15.0)  # seconds between queries to the scheduler: at first, and at most


class RunMonitor:
    """Knows whether a run is over. Queries the scheduler less and less often, but at once after a new verdict."""

    def __init__(self, folder: RunFolder, read: Callable[[RunFolder], Record] = read_record) -> None:
        self.folder = folder
        self.read = read
        self.record = read(folder)
        self.interval = QUERY_INTERVALS[0]
        self.next = time.monotonic() + self.interval
        self.verdict = newest_verdict(folder)
        self.certain = self.record.is_over and self.record.status == DONE

    def is_over(self) -> bool:
        verdict = newest_verdict(self.folder)
        if verdict != self.verdict:
            self.verdict, self.interval, self.next = verdict, QUERY_INTERVALS[0], 0.0
        if not self.certain and time.monotonic() >= self.next:
            self._query()
        return self.certain

    def _query(self) -> None:
        """Update the record. A job being requeued looks over for a moment, so any end but `done` is checked twice."""
        before, self.record = self.record, self.read(self.folder)
        if self.record.is_over:
            self.certain = self.record.status in (DONE, before.status)
            self.interval = QUERY_INTERVALS[0]
        else:
            self.interval = min(self.interval * 1.3, QUERY_INTERVALS[1])
        self.next = time.monotonic() + self.interval


def wait_until_over(folder: RunFolder) -> Record:
    """Wait until the run is over, and return its record."""
    monitor = RunMonitor(folder)
    while not monitor.is_over():
        time.sleep(POLL_INTERVAL)
    return monitor.record


def find_log(folder: RunFolder, *, rank: int = 0, attempt: int | None = None) -> Path | None:
    """Return the log with a rank's output: its own, or its node's in large runs; None if there is no attempt yet."""
    for candidate in reversed(folder.attempts()):
        if attempt is None or candidate.number == attempt:
            own = candidate.log(rank)
            return own if own.exists() else _node_log(folder, candidate.path, rank) or own
    return None


def _node_log(folder: RunFolder, attempt: Path, rank: int) -> Path | None:
    nproc = int(read_json(folder.run_json).get("nproc") or 1)
    path = attempt / f"node-{rank // nproc}.log"
    return path if path.exists() else None


def follow(folder: RunFolder, *, rank: int = 0, monitor: RunMonitor) -> Iterator[str]:
    """Yield a rank's output, attempt after attempt, until the run is over."""
    current: Path | None = None
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        over = monitor.is_over()  # checked before reading, so that the last lines are still read
        newest = find_log(folder, rank=rank)
        if current is None:
            current = newest
        if current is not None:
            for chunk in _read_from(current, position):
                position += len(chunk)
                yield decoder.decode(chunk)
            if newest != current:
                current, position = newest, 0
                continue
        if over:
            return
        time.sleep(POLL_INTERVAL)


def _read_from(path: Path, position: int) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(position)
            while chunk := file.read(65536):
                yield chunk
    except FileNotFoundError:
        return
