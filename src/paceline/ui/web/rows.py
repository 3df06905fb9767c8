"""The rows of all runs, kept for all open pages. Only runs that may have changed are read again."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from paceline.contract.run_folder import RunFolder
from paceline.ui.web.json_text import encode
from paceline.ui.web.lookup import find_trials
from paceline.watch.overview import Overview, make_overviews
from paceline.watch.records import LOST, QueryStates, find_runs, read_records

INTERVAL = 1.0  # seconds, at least, between two looks at the scratch folder
SETTLED = 120.0  # seconds after its last change in which a run that is over may go back into the queue
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


class Rows:
    """The rows of a scratch folder. `position` counts changes; each row knows when it last changed."""

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.scratch = scratch
        self.position = 0
        self._query = query
        self._rows: dict[Path, _Row] = {}
        self._by_key: dict[str, list[Path]] = {}
        self._gone: list[tuple[int, str]] = []  # positions and paths of rows that have disappeared
        self._next = 0.0
        self._lock = Lock()

    def read(self) -> bytes:
        """Return all rows as JSON: runs and started trials of sweeps, newest first."""
        with self._lock:
            self._refresh()
            about = {"scratch": str(self.scratch), "time": time.time(), "position": self.position}
            return _join(about, [row.text for row in self._rows.values()])

    def read_new(self, since: int) -> tuple[int, bytes]:
        """Return the position, and as JSON the rows that have changed after an earlier one and the paths of those gone.

        The JSON is empty if nothing has.
        """
        with self._lock:
            self._refresh()
            if self.position <= since:
                return self.position, b""
            gone = [path for position, path in self._gone if position > since]
            about = {"time": time.time(), "position": self.position, "gone": gone}
            return self.position, _join(about, [row.text for row in self._rows.values() if row.position > since])

    def folder(self, key: str) -> RunFolder | None:
        """Return the folder of a run that is known already, if only one run has this key."""
        found = self._by_key.get(key, ())
        return RunFolder(found[0]) if len(found) == 1 else None

    def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._next:
            return
        folders = [*find_runs(self.scratch), *find_trials(self.scratch)]
        stamps = {folder.path: _stamp(folder) for folder in folders}
        stale = [folder for folder in folders if self._is_stale(folder, stamps[folder.path])]
        position = self.position + 1
        fresh = dict(zip((f.path for f in stale), make_overviews(read_records(stale, self._query)), strict=True))
        rows: dict[Path, _Row] = {}
        for folder in folders:
            old, new = self._rows.get(folder.path), fresh.get(folder.path)
            if old is not None and new is None:
                rows[folder.path] = old
            elif old is not None and new == old.overview:
                rows[folder.path] = replace(old, stamp=stamps[folder.path], read=began)
            elif new is not None:
                rows[folder.path] = _Row(new, encode(new.to_json()), stamps[folder.path], began, position)
                self.position = position
        for path in self._rows.keys() - rows.keys():
            self._gone = [*self._gone[-999:], (position, str(path))]
            self.position = position
        self._rows = dict(sorted(rows.items(), key=lambda item: item[1].overview.created or 0.0, reverse=True))
        by_key: dict[str, list[Path]] = {}
        for path, row in self._rows.items():
            by_key.setdefault(_key(row.overview), []).append(path)
        self._by_key = by_key
        self._next = time.monotonic() + max(INTERVAL, IDLE_SHARE * (time.monotonic() - began))

    def _is_stale(self, folder: RunFolder, stamp: Stamp) -> bool:
        """A run that is over changes only if it is resumed, or if it was on its way back into the queue."""
        row = self._rows.get(folder.path)
        if row is None or not row.overview.is_over or row.stamp != stamp:
            return True
        is_recent = time.time() - max(stamp) / 1e9 < SETTLED
        return (is_recent or row.overview.status == LOST) and time.monotonic() - row.read > RECHECK


def _key(row: Overview) -> str:
    return row.run_id if row.trial is None else f"{row.sweep}-{row.trial}"


def _join(about: dict[str, Any], rows: list[bytes]) -> bytes:
    return encode(about)[:-1] + b',"runs":[' + b",".join(rows) + b"]}"


def _stamp(folder: RunFolder) -> Stamp:
    """Return when the run folder and the list of its job starts last changed."""
    return _changed(folder.path), _changed(folder.claims)


def _changed(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
