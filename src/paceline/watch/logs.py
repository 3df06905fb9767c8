"""A run's output as it comes: over relaunches and requeues, until the run is over."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE
from paceline.watch.records import Record, newest_verdict, read_json, read_record

POLL = 0.3  # seconds between looks at a file
ASK = (2.0, 15.0)  # seconds between questions to the scheduler: at first, and at most


class RunMonitor:
    """Knows whether a run is over. Asks the scheduler ever less often, and again at once when a verdict appears."""

    def __init__(self, folder: RunFolder, look: Callable[[RunFolder], Record] = read_record) -> None:
        self.folder = folder
        self.look = look
        self.record = look(folder)
        self.interval = ASK[0]
        self.next = time.monotonic() + self.interval
        self.verdict = newest_verdict(folder)
        self.certain = self.record.is_over and self.record.status == DONE

    def is_over(self) -> bool:
        verdict = newest_verdict(self.folder)
        if verdict != self.verdict:
            self.verdict, self.interval, self.next = verdict, ASK[0], 0.0
        if not self.certain and time.monotonic() >= self.next:
            self._ask()
        return self.certain

    def _ask(self) -> None:
        """A job that Slurm requeues looks ended for a moment: an end that is not a good one is looked at twice."""
        before, self.record = self.record, self.look(self.folder)
        if self.record.is_over:
            self.certain = self.record.status in (DONE, before.status)
            self.interval = ASK[0]
        else:
            self.interval = min(self.interval * 1.3, ASK[1])
        self.next = time.monotonic() + self.interval


def wait_until_over(folder: RunFolder) -> Record:
    """Return when the run is over."""
    monitor = RunMonitor(folder)
    while not monitor.is_over():
        time.sleep(POLL)
    return monitor.record


def find_log(folder: RunFolder, *, rank: int = 0, attempt: int | None = None) -> Path | None:
    """Where a rank's lines are: its own log, or its node's where there are too many ranks. None: not yet."""
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
    """Pieces of a rank's output until the run is over; a new attempt's log follows the old one's."""
    current: Path | None = None
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        over = monitor.is_over()  # before reading: what was written until then is still read
        newest = find_log(folder, rank=rank)
        if current is None:
            current = newest
        if current is not None:
            for text in _read_on(current, position):
                position += len(text)
                yield decoder.decode(text)
            if newest != current:
                current, position = newest, 0
                continue
        if over:
            return
        time.sleep(POLL)


def _read_on(path: Path, position: int) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(position)
            while piece := file.read(65536):
                yield piece
    except FileNotFoundError:
        return
