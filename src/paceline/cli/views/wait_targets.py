"""What `paceline wait` waits for: a run, or all trials of a sweep."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from paceline.cli import console, runs
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep.folder import DONE, PRUNED, SweepFolder
from paceline.contract.typed_command import to_type
from paceline.contract.verdict import DONE_UNSAVED, STOPPED, STOPPED_EXIT
from paceline.spec.quantities import show_seconds
from paceline.sweep.results import PENDING, RUNNING, Sweep, read_sweep
from paceline.watch.overview import make_overview
from paceline.watch.run_follower import RunMonitor

REFRESH = 2.0  # seconds between looks at the numbers of a run
SWEEP_REFRESH = 5.0


@dataclass(frozen=True)
class Progress:
    """How far a run or a sweep is."""

    status: str
    done: int = 0
    total: int | None = None
    unit: str = "steps"
    note: str = ""  # the time left, or why it waits


class Target(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def seems_over(self) -> bool:
        """Whether it is over, or was at the last look: a job that is being requeued looks over for a moment."""

    @property
    def exit_code(self) -> int: ...

    @property
    def progress(self) -> Progress: ...

    def update(self) -> None:
        """Look at the files, and at what the scheduler last answered."""

    def explain(self, *, with_name: bool) -> None:
        """Say why it failed, once it is over."""


class RunTarget:
    """A run."""

    def __init__(self, folder: RunFolder, typed: str) -> None:
        self.is_over = False
        self._folder, self.key = folder, folder.key
        self._monitor = RunMonitor(folder)
        name = str(self._monitor.record.details.get("name", ""))
        self.name = name if name and name.startswith(typed) else folder.key  # as the user calls it
        self._next = 0.0
        self.progress = Progress(self._monitor.record.status)

    @property
    def seems_over(self) -> bool:
        return self.is_over or self._monitor.record.is_over

    @property
    def exit_code(self) -> int:
        record = self._monitor.record
        return 0 if record.status == DONE else STOPPED_EXIT if record.can_go_on else 1

    def update(self) -> None:
        if self.is_over:
            return
        self.is_over = self._monitor.is_over()
        record = self._monitor.record
        if self.is_over or record.status != self.progress.status or time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH
            row = make_overview(record)
            left = f"{show_seconds(row.seconds_left)} left" if row.seconds_left is not None else ""
            note = left if row.status == "running" else row.detail
            self.progress = Progress(row.status, row.step or 0, row.total_steps, note=note)

    def explain(self, *, with_name: bool) -> None:
        record = self._monitor.record
        if self.is_over and record.status not in (DONE, STOPPED, DONE_UNSAVED, "cancelled"):
            runs.say_failure(self._folder, self.name if with_name else "")


class SweepTarget:
    """All trials of a sweep."""

    def __init__(self, folder: SweepFolder) -> None:
        self.name = folder.name
        self.is_over = False
        self._folder = folder
        self._sweep: Sweep = read_sweep(folder)
        # times in a row: a trial that is being requeued looks missing for a moment
        self._seen_over = 0
        self._next = 0.0
        self.progress = self._read()

    @property
    def seems_over(self) -> bool:
        return self.is_over or self._seen_over > 0

    @property
    def exit_code(self) -> int:
        return 0 if set(self._sweep.counts) <= {DONE, PRUNED} else 1

    def update(self) -> None:
        if self.is_over or time.monotonic() < self._next:
            return
        self._sweep = read_sweep(self._folder)
        self._next = time.monotonic() + SWEEP_REFRESH
        ended = not {RUNNING, PENDING} & set(self._sweep.counts)
        self._seen_over = self._seen_over + 1 if ended else 0
        self.is_over = ended and (self.exit_code == 0 or self._seen_over > 1)
        self.progress = self._read()

    def _read(self) -> Progress:
        counts = self._sweep.counts
        total = sum(counts.values())
        open_trials = counts.get(RUNNING, 0) + counts.get(PENDING, 0)
        status = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no trials"
        return Progress(status, total - open_trials, total, unit="trials")

    def explain(self, *, with_name: bool) -> None:
        failed = [
            trial
            for trial in self._sweep.trials
            if trial.state not in (DONE, PRUNED, RUNNING, PENDING)
        ]
        if self.is_over and failed:
            first = failed[0]
            console.say(
                f"paceline: trial {self.name}-{first.number} {first.state}{f': {first.error}' if first.error else ''}",
                colour=console.RED,
            )
            if len(failed) > 1:
                console.say(f"  and {len(failed) - 1} more: {to_type(f'sweep show {self.name}')}")
