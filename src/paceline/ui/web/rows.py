"""The rows of all runs and sweeps as JSON, kept for all open pages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

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


@dataclass(frozen=True)
class _Row:
    overview: Overview | SweepOverview
    text: bytes  # the same as JSON: ten thousand rows are encoded once, and not for each page
    position: int


class Rows:
    """The rows of a scratch folder. `position` counts changes; each row knows when it last
    changed.
    """

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.position = 0
        self._list = RunList(scratch, query)
        self._rows: dict[str, _Row] = {}  # by path
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
            about: dict[str, Any] = {"scratch": self._shown, "position": self.position}
            about["gone"] = [path for position, path in self._gone if position > since]
            rows = [row for row in self._rows.values() if row.position > since]
            sweeps = (row for row in rows if isinstance(row.overview, SweepOverview))
            runs = (row for row in rows if isinstance(row.overview, Overview))
            lists = b',"sweeps":[' + _join(sweeps) + b'],"runs":[' + _join(runs) + b"]}"
            return self.position, encode(about)[:-1] + lists

    def run(self, key: str) -> RunFolder:
        """Return the run with an id, or the trial SWEEP-3, your own first. Raises NoSuchRun."""
        return RunFolder(self._find("run", {"key": key}, Overview))

    def sweep(self, name: str) -> SweepFolder:
        return SweepFolder(self._find("sweep", {"name": name}, SweepOverview))

    def by_job(self) -> dict[str, Overview]:
        """Return the runs by their newest job."""
        found = (row.overview for row in [*self._rows.values()])
        return {run.job: run for run in found if isinstance(run, Overview) and run.job}

    def _find(self, kind: str, wanted: Mapping[str, str], of: type) -> Path:
        """Return a row's folder. A name is compared with what there is, never used as a path."""
        ((attribute, name),) = wanted.items()
        for is_again in (False, True):
            with self._lock:
                self._refresh(now=is_again)  # it may have just been made
                rows = [row.overview for row in self._rows.values() if type(row.overview) is of]
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
        changed = [
            row for path, row in read.items() if path not in known or row != known[path].overview
        ]
        gone = known.keys() - read.keys()
        if changed or gone or shown != self._shown:
            self.position += 1
            self._shown = shown
        for row in changed:
            known[row.path] = _Row(row, encode(row.to_json()), self.position)
        for path in gone:
            del known[path]
            self._gone = [*self._gone[-999:], (self.position, path)]
        self._next = time.monotonic() + max(INTERVAL, IDLE_SHARE * (time.monotonic() - began))


def _join(rows: Iterable[_Row]) -> bytes:
    return b",".join(row.text for row in rows)
