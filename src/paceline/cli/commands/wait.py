"""`paceline wait`: wait for runs to finish."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import DONE, PRUNED, SweepFolder
from paceline.contract.verdict import DONE_UNSAVED, STOPPED, STOPPED_EXIT
from paceline.errors import UsageError
from paceline.spec.quantities import parse_wait, show_seconds
from paceline.spec.shell_text import quote, to_type
from paceline.sweep.results import PENDING, RUNNING, find_sweep, read_sweep
from paceline.watch.overview import make_overview
from paceline.watch.run_follower import RunMonitor

TIMEOUT = "--timeout"
TIMEOUT_EXIT = 124  # as that of timeout(1)
POLL_INTERVAL = 0.5  # seconds between looks at the files of a run
MOST_LOOKS = 50  # per second, at all runs together
RUN_REFRESH, SWEEP_REFRESH = 2.0, 5.0  # seconds between looks at their numbers

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Runs or sweeps: ids, names, job ids, folders, or `last`."),
]


class Target:
    """A run or a sweep, and how far it is."""

    name = ""
    is_over = False
    seems_over = False  # or was at the last look: a job that is requeued looks over for a moment
    status = ""
    steps = ""  # how many of how many are done
    note = ""  # the time left, or why it waits
    exit_code = 1

    @property
    def text(self) -> str:
        return ", ".join(filter(None, (self.status, self.steps, self.note)))

    def update(self) -> None:
        """Look at the files, and at what the scheduler last answered."""

    def explain(self, prefix: str) -> None:
        """Say why it failed, once it is over."""


class RunTarget(Target):
    def __init__(self, folder: RunFolder, typed: str) -> None:
        self.folder = folder
        self._monitor = RunMonitor(folder)
        name = str(self._monitor.record.details.get("name", ""))
        self.name = name if name and name.startswith(typed) else folder.key  # as the user calls it
        self._next = 0.0

    def update(self) -> None:
        self.is_over = self._monitor.is_over()
        record = self._monitor.record
        self.seems_over = self.is_over or record.is_over
        self.exit_code = 0 if record.status == DONE else STOPPED_EXIT if record.can_go_on else 1
        if not self.is_over and record.status == self.status and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + RUN_REFRESH
        row = make_overview(record)
        left = f"{show_seconds(row.seconds_left)} left" if row.seconds_left is not None else ""
        self.status, self.note = row.status, left if row.status == "running" else row.detail
        done = row.step or 0
        self.steps = (
            f"{done:,} of {row.total_steps:,} steps" if row.total_steps else f"step {done:,}"
        )

    def explain(self, prefix: str) -> None:
        if self._monitor.record.status not in (DONE, STOPPED, DONE_UNSAVED, "cancelled"):
            runs.say_failure(self.folder, prefix)


class SweepTarget(Target):
    def __init__(self, folder: SweepFolder) -> None:
        self.name = folder.name
        self._folder = folder
        self._next = 0.0

    def update(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SWEEP_REFRESH
        self._sweep = read_sweep(self._folder)
        counts = self._sweep.counts
        self.exit_code = 0 if set(counts) <= {DONE, PRUNED} else 1
        left, total = counts.get(RUNNING, 0) + counts.get(PENDING, 0), sum(counts.values())
        self.steps = f"{total - left:,} of {total:,} trials"
        self.status = ", ".join(f"{count} {state}" for state, count in counts.items())
        self.is_over = left == 0 and (self.exit_code == 0 or self.seems_over)
        self.seems_over = left == 0

    def explain(self, prefix: str) -> None:
        ended_well = (DONE, PRUNED, RUNNING, PENDING)
        failed = [trial for trial in self._sweep.trials if trial.state not in ended_well]
        for trial in failed[:1]:
            error = f": {trial.error}" if trial.error else ""
            text = f"paceline: trial {self.name}-{trial.number} {trial.state}{error}"
            console.say(text, colour=console.RED)
        if len(failed) > 1:
            console.say(f"  and {len(failed) - 1} more: {to_type(f'sweep show {self.name}')}")


def command(
    names: Names = None,
    *,
    timeout: Annotated[
        str,
        typer.Option(
            TIMEOUT,
            metavar="TIME",
            help="Give up after this long, e.g. 90m or 2h30m; a bare number counts seconds.",
        ),
    ] = "",
) -> int:
    """Wait for runs to finish; the exit code says how they ended.

    0: all are done. 1: one has failed, was cancelled or is lost. 75: one was stopped, perhaps by
    `cancel --save`, and can be resumed. 124: --timeout has passed. 130: Ctrl-C; the runs continue.

    \b
      paceline wait 1a2b && paceline export 1a2b
      paceline wait --timeout 2h 1a2b 3c4d
      paceline wait my-sweep            all trials of a sweep
    """
    seconds = parse_wait(timeout, TIMEOUT) if timeout else None
    deadline = None if seconds is None else time.monotonic() + seconds
    targets = [_find(name) for name in names or ["last"]]
    try:
        _wait(targets, deadline)
    except KeyboardInterrupt:
        for target in targets:
            if not target.seems_over:
                console.say_note(f"{target.name} keeps running")
        raise
    for target in targets:
        if target.is_over:
            target.explain(target.name if len(targets) > 1 else "")
    left = [target for target in targets if not target.is_over]
    if left and seconds is not None:
        _say_left(left, show_seconds(seconds))
        return TIMEOUT_EXIT
    codes = {target.exit_code for target in targets}
    return 1 if 1 in codes else max(codes)


def _say_left(targets: Sequence[Target], waited: str) -> None:
    """Say which runs are not over, and which look so, but may go back into the queue."""
    left = ", ".join(target.name for target in targets if not target.seems_over)
    unsure = ", ".join(f"{each.name} ({each.status})" for each in targets if each.seems_over)
    if left:
        console.say_problem(
            f"Not finished after {waited}: {left}.", "Only the wait timed out; the runs continue."
        )
    if unsure:
        console.say_problem(
            f"Could not confirm within {waited} that these runs have finished: {unsure}.",
            "Paceline checks twice, a few seconds apart, because a job that is being requeued "
            "briefly looks finished. Use a longer --timeout.",
        )


def _wait(targets: Sequence[Target], deadline: float | None) -> None:
    """Show the progress of runs until all are over, or the time is up."""
    pause = max(POLL_INTERVAL, len(targets) / MOST_LOOKS)
    with _status(targets) if sys.stderr.isatty() else _lines(targets) as show:
        while True:
            for target in targets:
                if not target.is_over:
                    target.update()
            show()
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0 or all(target.is_over for target in targets):
                return
            time.sleep(left)


@contextmanager
def _lines(targets: Sequence[Target]) -> Iterator[Callable[[], None]]:
    """Print the status of each run when it changes."""
    said: dict[Target, str] = {}

    def show() -> None:
        for target in targets:
            note = f" ({target.note})" if target.note and target.status != "running" else ""
            text = console.printable(f"{target.name}: {target.status}{note}")
            if said.get(target) != text:
                said[target] = text
                print(text, flush=True)

    yield show


@contextmanager
def _status(targets: Sequence[Target]) -> Iterator[Callable[[], None]]:
    """Keep a line on stderr that says how far each run is."""
    with console.console(stderr=True).status("") as line:

        def show() -> None:
            texts = (f"{each.name}: {each.text}" for each in targets)
            line.update(console.cell(" · ".join(texts)))

        yield show


def _find(name: str) -> Target:
    """Return the run or the sweep that a name means. The whole name of a sweep is more than the
    start of a run's.
    """
    found = runs.run_or_sweep(name)
    if isinstance(found, SweepFolder):
        return SweepTarget(found)
    run = RunTarget(found, name)
    if run.name == found.key:  # not called by its name
        return run
    try:
        sweep = find_sweep(name, runs.scratch_here())
    except UsageError:
        return run
    if sweep.name == name == run.name:
        one, all_trials = found.key, quote(str(sweep.path))
        raise UsageError(
            f"{name!r} is the name of a run and of a sweep.",
            hint=f"Wait for the run with `paceline wait {one}`, or for the sweep with `paceline "
            f"wait {all_trials}`.",
        )
    return SweepTarget(sweep) if sweep.name == name else run
