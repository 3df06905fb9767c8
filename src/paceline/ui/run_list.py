"""The runs and sweeps of a scratch folder, read again and again for a view."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.sweep.overview import SweepOverview, SweepOverviews, find_sweeps, started_trials
from paceline.watch.events import newest_change
from paceline.watch.overview import Overview, read_rows
from paceline.watch.records import QueryStates, find_runs
from paceline.watch.run_status import LOST

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
