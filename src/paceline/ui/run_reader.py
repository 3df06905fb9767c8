"""One run, read again and again for a view: of its curves and its log, only what is new."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.contract.run_folder import RunFolder
from paceline.watch.curves import Curve, Curves, MetricsReader
from paceline.watch.details import RunDetails, read_details
from paceline.watch.records import QueryStates, read_record
from paceline.watch.run_log import LogLine, RunLog
from paceline.watch.run_status import newest_verdict

DETAILS, DETAILS_OF_ENDED = 2.0, 10.0  # seconds between reads of a run's details, at least
IDLE_SHARE = 10  # reading that takes long is followed by a pause of so many times its duration
MAX_LINES = 2000  # of a log, at a time
SCAN = 1 << 28  # bytes at the end of the logs that a search reads: seconds of work at most


class CurveReader:
    """The metrics of a run as they grow."""

    def __init__(self, folder: RunFolder) -> None:
        self.all = Curves()
        self._metrics = MetricsReader(folder.metrics)
        self._is_first = True

    def read(self) -> tuple[list[Curve], bool]:
        """Return the points that are new, or all of them (then the second value is true): at
        first, and after a restart has undone steps.
        """
        records = list(self._metrics.read_new())
        went_back = self.all.add(records)
        is_whole, self._is_first = self._is_first or went_back, False
        if is_whole or not records:
            return (self.all.all() if is_whole else []), is_whole
        new = Curves()
        new.add(records)
        return new.all(), False


@dataclass(frozen=True)
class Wanted:
    """Which lines of a log a view wants."""

    rank: int | None = None
    attempt: int | None = None
    grep: str = ""
    count: int = MAX_LINES


@dataclass(frozen=True)
class News:
    """What has changed since the last read."""

    details: RunDetails | None = None  # None: nothing
    curves: list[Curve] = field(default_factory=list)
    whole_curves: bool = False  # they replace those that the view has
    lines: list[LogLine] = field(default_factory=list)
    whole_log: bool = False  # the same for the lines


class RunReader:
    """Reads a run's files as they grow."""

    def __init__(self, folder: RunFolder, query: QueryStates, wanted: Wanted | None = None) -> None:
        """`wanted` is None if a view does not show the log."""
        self.folder, self._query, self.wanted = folder, query, wanted
        self.curves = CurveReader(folder)
        self._log = RunLog(folder)
        self._has_lines = False
        self._details: RunDetails | None = None
        self._next_details = 0.0

    def read(self) -> News:
        """Return what is new; the first time, everything."""
        curves, whole = self.curves.read()
        lines, whole_log = self._read_lines() if self.wanted is not None else ([], False)
        return News(self._read_details(), curves, whole, lines, whole_log)

    def _read_details(self) -> RunDetails | None:
        began = time.monotonic()
        if began < self._next_details:
            return None
        details = read_details(read_record(self.folder, self._query))
        pause = DETAILS_OF_ENDED if details.overview.is_over else DETAILS
        took = time.monotonic() - began
        self._next_details = time.monotonic() + max(pause, IDLE_SHARE * took)
        if details == self._details:
            return None
        self._details = details
        return details

    def _read_lines(self) -> tuple[list[LogLine], bool]:
        wanted = self.wanted
        assert wanted is not None
        if not self._has_lines:
            self._has_lines = True
            lines = self._log.tail(
                wanted.count,
                rank=wanted.rank,
                attempt=wanted.attempt,
                grep=wanted.grep,
                complete=True,
                scan=SCAN,
            )
            return lines, True
        is_over = newest_verdict(self.folder) is not None  # then the last line may have no end
        new = self._log.read_new(rank=wanted.rank, grep=wanted.grep, finish=is_over)
        lines = [line for line in new if wanted.attempt in (None, line.attempt)]
        # No view wants that many lines, and none may miss some without a sign.
        return lines[-MAX_LINES:], len(lines) > MAX_LINES
