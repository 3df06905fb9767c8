"""The selected run: its details, curves and log, of which only what is new is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.ui.terminal.top.data.points import read_point
from paceline.ui.terminal.top.data.reader import newest_change
from paceline.watch.curves import Curve, Curves, MetricsReader
from paceline.watch.details import RunDetails, read_details, renew_numbers
from paceline.watch.overview import Overview
from paceline.watch.records import QueryStates, Record, read_record
from paceline.watch.run_log import LogLine, RunLog

NUMBERS_INTERVAL = 2.0  # seconds between new numbers, and between drawings of the curves
DETAILS_INTERVAL = 8.0  # seconds between reads of what nodes and events say
STATE_INTERVAL = 15.0  # seconds after which a run whose files are silent is looked at again
MAX_LINES = 2000  # of a log
SCAN = 1 << 28  # bytes at the end of the logs that a search reads
# What every run logs about itself comes after the script's own metrics.
COMMON = frozenset(
    {"seconds", "data_wait", "samples_per_second", "tokens_per_second", "peak_memory", "mfu", "lr"}
)


@dataclass(frozen=True)
class News:
    """What has changed since the last read; None if it has not."""

    path: str
    details: RunDetails | None
    curves: list[Curve] | None  # those to draw
    lines: list[LogLine]
    anew: bool  # the lines replace all earlier ones
    searched: str


@dataclass
class Choice:
    """Which metrics to draw: so many, from this one on, the loss first."""

    first: int = 0
    count: int = 1

    def names(self, known: Sequence[str]) -> list[str]:
        ordered = sorted(known, key=lambda name: (name in COMMON, "loss" not in name.lower()))
        first = self.first % max(1, len(ordered))
        return [*ordered[first:], *ordered[:first]][: self.count]


class SelectedRun:
    def __init__(self, path: str, query: QueryStates, *, searched: str = "") -> None:
        self.path, self.searched = path, searched
        self._folder, self._query = RunFolder(Path(path)), query
        self._metrics, self._curves = MetricsReader(self._folder.metrics), Curves()
        self._log = RunLog(self._folder)
        self._details: RunDetails | None = None
        self._changes: tuple[int, ...] = ()
        self._read_details_at = self._read_numbers_at = 0.0
        self._drawn: list[str] = []
        self._has_lines = self._has_new_numbers = False
        self._is_behind = False

    def catch_up(self) -> None:
        """Read all numbers again with the next call: somebody has seen newer ones. May be called by any thread."""
        self._is_behind = True

    def read(self, choice: Choice) -> News:
        """Return what is new."""
        position = self._metrics.position
        self._curves.add(self._metrics.read_new())
        self._has_new_numbers = self._has_new_numbers or self._metrics.position != position
        is_due = (
            self._has_new_numbers and time.monotonic() - self._read_numbers_at >= NUMBERS_INTERVAL
        )
        if is_due or self._is_behind:
            is_due, self._is_behind = True, False
            self._has_new_numbers, self._read_numbers_at = False, time.monotonic()
        names = choice.names(self._curves.names)
        curves = (
            [self._curves.curve(name) for name in names] if is_due or names != self._drawn else None
        )
        self._drawn = names
        details = self._read_details(numbers=is_due)
        # as the curves have it, although the run may have written more meanwhile
        if details is not None:
            details = self._details = replace(
                details, overview=self._with_newest_loss(details.overview)
            )
        return News(self.path, details, curves, *self._read_lines(), self.searched)

    def _with_newest_loss(self, run: Overview) -> Overview:
        if run.loss is None or run.loss_name not in self._curves.names:
            return run
        return replace(run, loss=self._curves.curve(run.loss_name).values[-1])

    def _read_lines(self) -> tuple[list[LogLine], bool]:
        if self._has_lines:
            return self._log.read_new(grep=self.searched)[-MAX_LINES:], False
        self._has_lines = True
        return self._log.tail(MAX_LINES, grep=self.searched, complete=True, scan=SCAN), True

    def _read_details(self, *, numbers: bool) -> RunDetails | None:
        """Read the details again if their files have changed, or else only the numbers that the metrics have."""
        now, folder = time.monotonic(), self._folder
        if self._details is None or now - self._read_details_at >= DETAILS_INTERVAL:
            changes = self._look()
            if changes != self._changes or now - self._read_details_at >= STATE_INTERVAL:
                self._changes, self._read_details_at = changes, now
                self._details = self._read_all(read_record(folder, self._query))
                return self._details
        if numbers and self._details is not None:
            before = self._details.overview
            record = read_record(folder, self._query)
            is_same = (record.status, record.attempts) == (before.status, before.attempts)
            self._details = (
                renew_numbers(self._details, record) if is_same else self._read_all(record)
            )
            return self._details
        return None

    def _read_all(self, record: Record) -> RunDetails:
        details = read_details(record)
        return replace(details, config={**read_point(self._folder), **details.config})

    def _look(self) -> tuple[int, ...]:
        folder = self._folder
        samples = (folder.node_metrics(number) for number in range(4))
        attempts = (each.path for each in folder.attempts()[-1:])
        events = sorted(folder.events.glob("*.jsonl"))
        others = (folder.path, folder.claims, folder.checkpoints, folder.events)
        return newest_change([*others, *events, *samples, *attempts])
