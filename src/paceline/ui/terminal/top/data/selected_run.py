"""The selected run: its details, curves and log, of which only what is new is read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.ui.terminal.top.data.reader import newest_change
from paceline.ui.terminal.top.panes.log_pane import MAX_LINES
from paceline.watch.details import RunDetails, read_details
from paceline.watch.logs.run_log import LogLine, RunLog
from paceline.watch.metrics.curves import Curve, Curves
from paceline.watch.metrics.metrics_file import MetricsFile
from paceline.watch.overview import make_overview
from paceline.watch.records import QueryStates, read_record

DETAILS_INTERVAL = 5.0  # seconds between reads of what nodes and events say
STATE_INTERVAL = 15.0  # seconds after which a run whose files are silent is looked at again


@dataclass(frozen=True)
class News:
    """What has changed since the last read; None if it has not."""

    path: str
    details: RunDetails | None
    curves: list[Curve] | None
    lines: list[LogLine]
    anew: bool  # the lines replace all earlier ones
    searched: str


class SelectedRun:
    def __init__(self, path: str, query: QueryStates, *, searched: str = "") -> None:
        self.path, self.searched = path, searched
        self._folder, self._query = RunFolder(Path(path)), query
        self._metrics, self._curves = MetricsFile(self._folder.metrics), Curves()
        self._log = RunLog(self._folder)
        self._details: RunDetails | None = None
        self._changes: tuple[int, ...] = ()
        self._read_details_at = 0.0
        self._has_lines = False

    def read(self) -> News:
        """Return what is new."""
        added = list(self._metrics.read_new())
        self._curves.add(added)
        details = self._read_details(changed=bool(added))
        curves = self._curves.all() if added or not self._has_lines else None
        return News(self.path, details, curves, *self._read_lines(), self.searched)

    def _read_lines(self) -> tuple[list[LogLine], bool]:
        if self._has_lines:
            return self._log.read_new(grep=self.searched)[-MAX_LINES:], False
        self._has_lines = True
        return self._log.tail(MAX_LINES, grep=self.searched, complete=True), True

    def _read_details(self, *, changed: bool) -> RunDetails | None:
        """Read the details again if their files have changed, or else only the numbers that the metrics have."""
        now, folder = time.monotonic(), self._folder
        if self._details is None or now - self._read_details_at >= DETAILS_INTERVAL:
            changes = self._look()
            if changes != self._changes or now - self._read_details_at >= STATE_INTERVAL:
                self._changes, self._read_details_at = changes, now
                self._details = read_details(read_record(folder, self._query))
                return self._details
        if changed and self._details is not None:
            self._details = replace(self._details, overview=make_overview(read_record(folder, self._query)))
            return self._details
        return None

    def _look(self) -> tuple[int, ...]:
        folder = self._folder
        samples = (folder.node_metrics(number) for number in range(4))
        attempts = (each.path for each in folder.attempts()[-1:])
        events = sorted(folder.events.glob("*.jsonl"))
        others = (folder.path, folder.claims, folder.checkpoints, folder.events)
        return newest_change([*others, *events, *samples, *attempts])
