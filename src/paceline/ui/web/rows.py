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
from paceline.watch.overview import Overview, make_overviews
from paceline.watch.records import QueryStates, find_runs, read_records

INTERVAL = 1.0  # seconds, at least, between two looks at the scratch folder
IDLE_SHARE = 5  # a look that takes long is followed by a pause of so many times its duration


@dataclass(frozen=True)
class _Row:
    overview: Overview
    text: bytes  # the same as JSON: ten thousand rows are encoded once, and not for each page
    changed: int  # the folder's time of change, in ns
    position: int


class Rows:
    """The rows of a scratch folder. `position` counts changes; each row knows when it last changed."""

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.scratch = scratch
        self.position = 0
        self._query = query
        self._rows: dict[Path, _Row] = {}
        self._by_id: dict[str, list[Path]] = {}
        self._gone: list[tuple[int, str]] = []  # positions and paths of rows that have disappeared
        self._next = 0.0
        self._lock = Lock()

    def read(self) -> bytes:
        """Return all rows, newest first, as JSON."""
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

    def folder(self, run_id: str) -> RunFolder | None:
        """Return the folder of a run that is known already, if only one run has this id."""
        found = self._by_id.get(run_id, ())
        return RunFolder(found[0]) if len(found) == 1 else None

    def _refresh(self) -> None:
        began = time.monotonic()
        if began < self._next:
            return
        folders = find_runs(self.scratch)
        changed = {folder.path: _changed(folder) for folder in folders}
        stale = [folder for folder in folders if self._is_stale(folder, changed[folder.path])]
        position = self.position + 1
        fresh = dict(zip((f.path for f in stale), make_overviews(read_records(stale, self._query)), strict=True))
        rows: dict[Path, _Row] = {}
        for folder in folders:
            old, new = self._rows.get(folder.path), fresh.get(folder.path)
            if old is not None and (new is None or new == old.overview):
                rows[folder.path] = replace(old, changed=changed[folder.path])
            elif new is not None:
                rows[folder.path] = _Row(new, encode(new.to_json()), changed[folder.path], position)
                self.position = position
        for path in self._rows.keys() - rows.keys():
            self._gone = [*self._gone[-999:], (position, str(path))]
            self.position = position
        if rows.keys() != self._rows.keys():
            by_id: dict[str, list[Path]] = {}
            for path in rows:
                by_id.setdefault(path.name, []).append(path)
            self._by_id = by_id
        self._rows = rows
        took = time.monotonic() - began
        self._next = time.monotonic() + max(INTERVAL, IDLE_SHARE * took)

    def _is_stale(self, folder: RunFolder, changed: int) -> bool:
        """A run that is over changes only if it is resumed, which makes files in its folder."""
        row = self._rows.get(folder.path)
        return row is None or not row.overview.is_over or row.changed != changed


def _join(about: dict[str, Any], rows: list[bytes]) -> bytes:
    return encode(about)[:-1] + b',"runs":[' + b",".join(rows) + b"]}"


def _changed(folder: RunFolder) -> int:
    try:
        return os.stat(folder.path).st_mtime_ns
    except OSError:
        return 0
