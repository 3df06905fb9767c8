"""The rows of all runs and sweeps as JSON, kept for all open pages."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock

from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import UsageError
from paceline.spec.user_files import is_own_folder
from paceline.sweep.report import SweepOverview
from paceline.ui.run_reader import RunList
from paceline.ui.text import encode
from paceline.watch import origin
from paceline.watch.overview import Overview
from paceline.watch.records import QueryStates

INTERVAL = 1.0  # seconds between reads, at least
IDLE_SHARE = 5  # a read that takes long is followed by a pause of so many times its duration


class NoSuchRun(UsageError):
    """There is no run or sweep of this name."""


class Rows:
    """The rows of a scratch folder. `position` counts changes; each row knows when it last
    changed.
    """

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.position = 0
        self._list = RunList(scratch, query)
        # rows by path, each with the position of its last change
        self._rows: dict[str, tuple[Overview | SweepOverview, int]] = {}
        self._gone: list[tuple[int, str]] = []  # positions and paths of rows that have disappeared
        self._shown = ""  # where the runs are, and why nothing new comes from there
        self._next = 0.0
        self._lock = Lock()

    def read(self, since: int = 0) -> tuple[int, bytes]:
        """Return the position, and as JSON the rows that have changed after an earlier one and the
        paths of those gone.
        """
        with self._lock:
            self._refresh()
            rows = [row for row, position in self._rows.values() if position > since]
            news = {
                "scratch": self._shown,
                "position": self.position,
                "gone": [path for position, path in self._gone if position > since],
                "sweeps": [row.to_json() for row in rows if isinstance(row, SweepOverview)],
                "runs": [row.to_json() for row in rows if isinstance(row, Overview)],
            }
            return self.position, encode(news)

    def run(self, key: str) -> RunFolder:
        """Return the run with an id, or the trial SWEEP-3, your own first. Raises NoSuchRun."""
        return RunFolder(self._find("run", "key", key))

    def sweep(self, name: str) -> SweepFolder:
        return SweepFolder(self._find("sweep", "name", name))

    def by_job(self) -> dict[str, Overview]:
        """Return the runs by their newest job."""
        found = [row for row, _ in [*self._rows.values()]]
        return {run.job: run for run in found if isinstance(run, Overview) and run.job}

    def _find(self, kind: str, attribute: str, name: str) -> Path:
        """Return a row's folder. A name is compared with what there is, never used as a path."""
        of = Overview if kind == "run" else SweepOverview
        for is_again in (False, True):
            with self._lock:
                self._refresh(now=is_again)  # it may have just been made
                rows = [row for row, _ in self._rows.values() if isinstance(row, of)]
            found = [Path(row.path) for row in rows if getattr(row, attribute) == name]
            if found:
                return next((path for path in found if is_own_folder(path)), found[0])
        raise NoSuchRun(f"There is no {kind} {name[:300]!r} in {origin.place(self._list.scratch)}.")

    def _refresh(self, *, now: bool = False) -> None:
        began = time.monotonic()
        if began < self._next and not now:
            return
        found = self._list.read()
        shown = " · ".join(filter(None, (origin.place(self._list.scratch), origin.status())))
        rows: list[Overview | SweepOverview] = [*found.sweeps, *found.runs]
        read = {row.path: row for row in rows}
        known = self._rows
        changed = [row for path, row in read.items() if path not in known or row != known[path][0]]
        gone = known.keys() - read.keys()
        if changed or gone or shown != self._shown:
            self.position += 1
            self._shown = shown
        for row in changed:
            known[row.path] = (row, self.position)
        for path in gone:
            del known[path]
            self._gone = [*self._gone[-999:], (self.position, path)]
        self._next = time.monotonic() + max(INTERVAL, IDLE_SHARE * (time.monotonic() - began))
