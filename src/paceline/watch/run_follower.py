"""Detect when a run is over, and follow its output until then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE
from paceline.watch.records import Record, read_record
from paceline.watch.run_log import LogLine, RunLog
from paceline.watch.run_status import newest_verdict

POLL_INTERVAL = 0.3  # seconds between reads of a file
PAUSES = (0.2, 2.0)  # seconds between reads of logs: while there is news, and at most
QUERY_INTERVALS = (2.0, 15.0)  # seconds between queries to the scheduler: at first, and at most


class RunMonitor:
    """Knows whether a run is over. Queries the scheduler less and less often, but at once after a
    new verdict.
    """

    def __init__(
        self, folder: RunFolder, read: Callable[[RunFolder], Record] = read_record
    ) -> None:
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
        """Update the record. A job being requeued looks over for a moment, so any end but `done`
        is checked twice.
        """
        before, self.record = self.record, self.read(self.folder)
        if self.record.is_over:
            self.certain = self.record.status in (DONE, before.status)
            self.interval = QUERY_INTERVALS[0]
        else:
            self.interval = min(self.interval * 1.3, QUERY_INTERVALS[1])
        self.next = time.monotonic() + self.interval


def wait_until_over(
    folder: RunFolder, tell: Callable[[Record], None] = lambda record: None
) -> Record:
    """Wait until the run is over, and return its record. `tell` gets it meanwhile, again and
    again.
    """
    monitor = RunMonitor(folder)
    while not monitor.is_over():
        tell(monitor.record)
        time.sleep(POLL_INTERVAL)
    return monitor.record


def follow(
    run_log: RunLog, monitor: RunMonitor, *, rank: int | None = None, grep: str = ""
) -> Iterator[list[LogLine]]:
    """Yield what the run prints, attempt after attempt, until it is over. An empty list means:
    nothing new for now.
    """
    pause = PAUSES[0]
    while True:
        # both checked before reading, so that the last lines are still read
        over = monitor.is_over()
        new = run_log.read_new(rank=rank, grep=grep, finish=over)
        yield new
        if new:
            pause = PAUSES[0]
        elif over:
            return
        else:
            time.sleep(pause)
            pause = min(pause * 1.1, PAUSES[1])
