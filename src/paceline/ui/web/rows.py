"""The rows of all runs, kept for all open pages. Only runs that may have changed are read again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep.folder import SweepFolder
from paceline.sweep.overview import SweepOverview, SweepOverviews
from paceline.ui.web.json_text import encode
from paceline.ui.web.lookup import find_sweeps, find_trials
from paceline.watch import origin
from paceline.watch.index import read_rows
from paceline.watch.overview import Overview
from paceline.watch.records import QueryStates, find_runs
from paceline.watch.run_status import LOST

INTERVAL = 1.0  # seconds between reads of the runs that are not over, at least
LISTING_INTERVAL = 20.0  # seconds after which all runs are listed even if no folder has changed
RESTLESS = 10.0  # seconds after such a change in which a new run may still get its first files
# seconds after its last change in which a run that is over may go back into the queue
SETTLED = 120.0
RECHECK = 5.0  # seconds between looks at such a run
IDLE_SHARE = 5  # a look that takes long is followed by a pause of so many times its duration


Stamp = tuple[int, int]  # times in ns


@dataclass(frozen=True)
class _Row:
    overview: Overview
    text: bytes  # the same as JSON: ten thousand rows are encoded once, and not for each page
    stamp: Stamp
    read: float
    position: int


@dataclass(frozen=True)
class _SweepRow:
    overview: SweepOverview
    text: bytes
    position: int


class Rows:
    """The rows of a scratch folder. `position` counts changes; each row knows when it last
    changed.
    """

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.scratch = scratch
        self.position = 0
        self._query = query
        self._rows: dict[Path, _Row] = {}
        self._sweeps: dict[str, _SweepRow] = {}  # by path
        self._sweep_folders: list[SweepFolder] = []
        self._sweep_overviews = SweepOverviews(query)
        self._by_key: dict[str, list[Path]] = {}
        self._gone: list[tuple[int, str]] = []  # positions and paths of rows that have disappeared
        self._stamps: dict[Path, Stamp] = {}  # of all runs
        self._marks: dict[Path, int] = {}  # when the folders that contain runs have changed
        self._next = self._next_listing = self._restless_until = 0.0
        self._place = ""  # where the runs are, and why nothing new comes from there
        self._lock = Lock()

    def read(self) -> bytes:
        """Return all rows as JSON: runs and started trials of sweeps, newest first; and the
        sweeps.
        """
        with self._lock:
            self._refresh()
            about = {"scratch": self._place, "time": time.time(), "position": self.position}
            return _join(about, sweeps=self._sweeps.values(), runs=self._rows.values())

    def read_new(self, since: int) -> tuple[int, bytes]:
        """Return the position, and as JSON the rows that have changed after an earlier one and the
        paths of those gone.

        The JSON is empty if nothing has.
        """
        with self._lock:
            self._refresh()
            if self.position <= since:
                return self.position, b""
            gone = [path for position, path in self._gone if position > since]
            about = {
                "scratch": self._place,
                "time": time.time(),
                "position": self.position,
                "gone": gone,
            }
            sweeps = [row for row in self._sweeps.values() if row.position > since]
            runs = [row for row in self._rows.values() if row.position > since]
            return self.position, _join(about, sweeps=sweeps, runs=runs)

    def folder(self, key: str) -> RunFolder | None:
        """Return the folder of a run that is known already, if only one run has this key."""
        found = self._by_key.get(key, ())
        return RunFolder(found[0]) if len(found) == 1 else None

    def by_job(self) -> dict[str, Overview]:
        """Return the runs that are known already, by their newest job."""
        with self._lock:
            return {
                row.overview.job: row.overview for row in self._rows.values() if row.overview.job
            }

    def _refresh(self) -> None:
        """Read the runs that may have changed. New ones are looked for if a folder that contains
        runs has changed.
        """
        began = time.monotonic()
        if began < self._next:
            return
        place = " · ".join(filter(None, (origin.place(self.scratch), origin.status())))
        if place != self._place:
            self.position += bool(self._place)
            self._place = place
        marks = {path: _changed(path) for path in self._marks}
        if marks != self._marks:
            self._restless_until = began + RESTLESS
        if began > self._next_listing or began < self._restless_until:
            self._list()
            self._next_listing = time.monotonic() + max(
                LISTING_INTERVAL, IDLE_SHARE * (time.monotonic() - began)
            )
        stale = [
            RunFolder(path) for path, stamp in self._stamps.items() if self._is_stale(path, stamp)
        ]
        self._put(dict(zip((each.path for each in stale), self._read(stale), strict=True)), began)
        self._put_sweeps(self._sweep_overviews.read(self._sweep_folders))
        self._next = time.monotonic() + max(INTERVAL, IDLE_SHARE * (time.monotonic() - began))

    def _list(self) -> None:
        """Find all runs, and what tells whether they have changed."""
        self._sweep_folders = find_sweeps(self.scratch)
        folders = [*find_runs(self.scratch), *find_trials(self._sweep_folders)]
        self._stamps = {folder.path: _stamp(folder) for folder in folders}
        parents = {folder.path.parent for folder in folders} | {
            sweep.path.parent for sweep in self._sweep_folders
        }
        above = {
            path
            for parent in parents
            for path in list(parent.parents)[:2]
            if path.is_relative_to(self.scratch)
        }
        self._marks = {path: _changed(path) for path in {self.scratch, *parents, *above}}
        gone = self._rows.keys() - self._stamps.keys()
        self.position += bool(gone)
        for path in gone:
            self._gone = [*self._gone[-999:], (self.position, str(path))]
            del self._rows[path]

    def _read(self, folders: list[RunFolder]) -> list[Overview]:
        return read_rows(folders, self.scratch, self._query)

    def _put(self, read: dict[Path, Overview], now: float) -> None:
        added = read.keys() - self._rows.keys()
        changed = {
            path: row
            for path, row in read.items()
            if path in added or row != self._rows[path].overview
        }
        self.position += bool(changed)
        for path, overview in read.items():
            if path in changed:
                row = _Row(
                    overview, encode(overview.to_json()), self._stamps[path], now, self.position
                )
            else:
                row = replace(self._rows[path], stamp=self._stamps[path], read=now)
            self._rows[path] = row
        if added:
            ordered = sorted(
                self._rows.items(), key=lambda item: item[1].overview.created or 0.0, reverse=True
            )
            self._rows = dict(ordered)
            by_key: dict[str, list[Path]] = {}
            for path, row in ordered:
                by_key.setdefault(row.overview.key, []).append(path)
            self._by_key = by_key

    def _put_sweeps(self, read: list[SweepOverview]) -> None:
        rows = {sweep.path: sweep for sweep in read}
        changed = {
            path
            for path, row in rows.items()
            if path not in self._sweeps or row != self._sweeps[path].overview
        }
        gone = self._sweeps.keys() - rows.keys()
        self.position += bool(changed or gone)
        self._gone = [*self._gone[-999:], *((self.position, path) for path in gone)]
        for path in changed:
            self._sweeps[path] = _SweepRow(rows[path], encode(rows[path].to_json()), self.position)
        self._sweeps = {path: self._sweeps[path] for path in rows}

    def _is_stale(self, path: Path, stamp: Stamp) -> bool:
        """A run that is over changes only if it is resumed, or if it was on its way back into the
        queue.
        """
        row = self._rows.get(path)
        if row is None or not row.overview.is_over or row.stamp != stamp:
            return True
        # its controller may have been away
        may_come_back = row.overview.status == LOST and bool(row.overview.job)
        is_recent = time.time() - max(stamp) / 1e9 < SETTLED
        return (is_recent or may_come_back) and time.monotonic() - row.read > RECHECK


def _join(about: dict[str, Any], *, sweeps: Iterable[_SweepRow], runs: Iterable[_Row]) -> bytes:
    """Return an object with lists of rows, which are JSON already."""
    return (
        encode(about)[:-1]
        + b',"sweeps":['
        + b",".join(row.text for row in sweeps)
        + b'],"runs":['
        + b",".join(row.text for row in runs)
        + b"]}"
    )


def _stamp(folder: RunFolder) -> Stamp:
    """Return when the run folder and the list of its job starts last changed."""
    return _changed(folder.path), _changed(folder.claims)


def _changed(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
