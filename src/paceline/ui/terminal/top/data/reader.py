"""Reads runs in threads, so that the screen answers at once however slow the file system is.

A thread that is stuck in a dead file system does not keep the program from ending.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.run_folder import RunFolder
from paceline.sweep.overview import SweepOverview, SweepOverviews, find_sweeps, started_trials
from paceline.sweep.report.numbers import to_label
from paceline.ui.terminal.top.data.points import read_point
from paceline.watch.index import read_rows
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


@dataclass(frozen=True)
class Found:
    """The runs and sweeps of a scratch folder. Trials that have started are among the runs."""

    runs: list[Overview] = field(default_factory=list)
    sweeps: list[SweepOverview] = field(default_factory=list)
    # the path of a trial -> its parameters, `lr=0.1 width=64`
    points: dict[str, str] = field(default_factory=dict)


class RunList:
    """The rows of a scratch folder. What is over is read again only if its folder changes."""

    def __init__(self, scratch: Path, query: QueryStates) -> None:
        self.scratch, self._query = scratch, query
        self._runs: dict[Path, tuple[int, Overview]] = {}
        self._sweeps = SweepOverviews(query)
        self._points: dict[str, str] = {}

    def read(self) -> Found:
        sweeps = list(find_sweeps(self.scratch))
        folders = find_runs(self.scratch)
        if not self._runs:
            self._read_first(folders)
        trials = [trial for sweep in sweeps for trial in started_trials(sweep)]
        self._read_points(trials)
        folders += trials
        changed = {folder.path: _changed(folder.path) for folder in folders}
        stale = [folder for folder in folders if self._is_stale(folder.path, changed[folder.path])]
        for record in read_records(stale, self._query):
            path = record.folder.path
            with suppress(Exception):  # a folder that nobody has foreseen must not hide all others
                self._runs[path] = (changed[path], make_overview(record))
        self._runs = {path: self._runs[path] for path in changed if path in self._runs}
        return Found(
            [overview for _, overview in self._runs.values()],
            self._sweeps.read(sweeps),
            dict(self._points),
        )

    def _read_points(self, trials: Iterable[RunFolder]) -> None:
        """Read the parameters of new trials; they never change."""
        known = self._points
        self._points = {}
        for trial in trials:
            path = str(trial.path)
            text = known.get(path) or _parameters(trial)
            if text:
                self._points[path] = text

    def _read_first(self, folders: list[RunFolder]) -> None:
        """Read all runs from the index, which knows those that are over."""
        with suppress(Exception):  # as above; without the index they are read one by one
            changed = {str(folder.path): _changed(folder.path) for folder in folders}
            for row in read_rows(folders, self.scratch, self._query):
                self._runs[Path(row.path)] = (changed[row.path], row)

    def _is_stale(self, path: Path, changed: int) -> bool:
        known = self._runs.get(path)
        return known is None or not known[1].is_over or known[0] != changed


def _parameters(trial: RunFolder) -> str:
    return " ".join(f"{name}={to_label(value)}" for name, value in read_point(trial).items())


def _changed(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def newest_change(paths: Iterable[Path]) -> tuple[int, ...]:
    """Return something that differs once one of these files or folders changes."""
    return tuple(_changed(path) for path in paths)
