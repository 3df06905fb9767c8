"""Runs as they grow, read again and again for a view: the list of all, and what is new of one."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.sweep.report import SweepOverview, SweepOverviews, find_sweeps, started_trials
from paceline.watch.details import RunDetails, read_details
from paceline.watch.events import newest_change
from paceline.watch.metrics import Curve, Curves, MetricsReader
from paceline.watch.overview import Overview, read_rows
from paceline.watch.records import QueryStates, find_runs, read_record
from paceline.watch.run_log import LogLine, RunLog
from paceline.watch.run_status import LOST, newest_verdict

# Seconds after its last change in which a run that is over may go back into the queue.
SETTLED = 120.0

Stamp = tuple[float, float]  # when a run's folder and the list of its job starts changed


@dataclass(frozen=True)
class Found:
    """The runs and sweeps of a scratch folder. Trials that have started are among the runs."""

    runs: list[Overview] = field(default_factory=list)
    sweeps: list[SweepOverview] = field(default_factory=list)


class RunList:
    """The rows of a scratch folder. What is over is read again only if its folder changes."""

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.scratch, self._query = scratch, query
        self._known: dict[Path, tuple[Stamp, Overview]] = {}
        self._sweeps = SweepOverviews(query)

    def read(self) -> Found:
        sweeps = list(find_sweeps(self.scratch))
        folders = find_runs(self.scratch)
        folders += [trial for sweep in sweeps for trial in started_trials(sweep)]
        stamps = {folder.path: _stamp(folder) for folder in folders}
        known = self._known
        stale = [folder for folder in folders if self._is_stale(folder.path, stamps[folder.path])]
        for row in self._read(stale):
            known[Path(row.path)] = (stamps[Path(row.path)], row)
        self._known = {path: known[path] for path in stamps if path in known}
        return Found([row for _, row in self._known.values()], self._sweeps.read(sweeps))

    def _read(self, folders: list[RunFolder]) -> list[Overview]:
        try:
            return read_rows(folders, self._query)
        # a folder that nobody has foreseen must not hide all others
        except Exception:
            found = []
            for folder in folders:
                with suppress(Exception):
                    found += read_rows([folder], self._query)
            return found

    def _is_stale(self, path: Path, stamp: Stamp) -> bool:
        """A run that is over changes only if it is resumed, or if it was on its way back into the
        queue.
        """
        known, run = self._known.get(path, ((), None))
        if run is None or not run.is_over or known != stamp:
            return True
        # the controller of a lost one may have been away
        may_come_back = run.status == LOST and bool(run.job)
        return may_come_back or time.time() - max(stamp) < SETTLED


def _stamp(folder: RunFolder) -> Stamp:
    return newest_change([folder.path]), newest_change([folder.claims])


# -- one run ---------------------------------------------------------------------------------------


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
