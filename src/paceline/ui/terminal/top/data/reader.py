"""Reads runs in threads, so that the screen answers at once however slow the file system is.

A thread that is stuck in a dead file system does not keep the program from ending.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.cluster.runs.folder import TRIALS
from paceline.contract.run_folder import RunFolder
from paceline.watch.overview import Overview, make_overview
from paceline.watch.records import QueryStates, find_runs, read_records

IDLE_SHARE = 60  # a read that takes CPU time is followed by a pause of so many times that


class Poller:
    """Calls a function again and again in a thread, less often if a call costs much."""

    def __init__(self, work: Callable[[], None], interval: float, name: str) -> None:
        self._work, self._interval = work, interval
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"paceline-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Call the function now."""
        self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.clear()
            began = time.thread_time()
            self._work()
            self._wanted.wait(max(self._interval, IDLE_SHARE * (time.thread_time() - began)))


class RunList:
    """The rows of all runs in a scratch folder. Runs that are over are read again only if their folder changes."""

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.scratch, self._query = scratch, query
        self._known: dict[Path, tuple[int, Overview]] = {}

    def read(self) -> list[Overview]:
        folders = [*find_runs(self.scratch), *find_trials(self.scratch)]
        changed = {folder.path: _changed(folder.path) for folder in folders}
        stale = [folder for folder in folders if self._is_stale(folder, changed[folder.path])]
        for record in read_records(stale, self._query):
            path = record.folder.path
            self._known[path] = (changed[path], make_overview(record))
        self._known = {path: self._known[path] for path in changed if path in self._known}
        return [overview for _, overview in self._known.values()]

    def _is_stale(self, folder: RunFolder, changed: int) -> bool:
        known = self._known.get(folder.path)
        return known is None or not known[1].is_over or known[0] != changed


def find_trials(scratch: Path) -> list[RunFolder]:
    """Return the trials of all sweeps in a scratch folder, as far as they have started."""
    return [RunFolder(path.parent) for path in scratch.glob(f"*/*/*/{TRIALS}/*/run.json")]


def _changed(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def newest_change(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return something that differs once one of these files or folders changes."""
    return tuple(_changed(path) for path in paths)
