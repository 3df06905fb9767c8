"""`paceline wait`: wait for runs to finish."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.contract.run_folder import DONE_UNSAVED, STOPPED, STOPPED_EXIT, RunFolder
from paceline.contract.sweep_folder import DONE, PRUNED, SweepFolder
from paceline.errors import UsageError
from paceline.spec.quantities import parse_seconds, show_seconds
from paceline.spec.shell_text import to_type
from paceline.sweep.results import PENDING, RUNNING, read_sweep
from paceline.watch.overview import make_overview
from paceline.watch.records import Record
from paceline.watch.run_log import RunMonitor

TIMEOUT_EXIT = 124  # as that of timeout(1)
POLL_INTERVAL = 0.5  # seconds between looks at the files of a run
MOST_LOOKS = 50  # per second, at all runs together
SWEEP_REFRESH = 5.0  # seconds between looks at the trials of a sweep


class RunTarget:
    """A run, and how far it is."""

    status, note = "", ""  # the note has steps and the time left, or why it waits

    def __init__(self, folder: RunFolder) -> None:
        self.name = folder.key
        self._monitor = RunMonitor(folder)
        self._record: Record | None = None

    def is_over(self) -> bool:
        over, record = self._monitor.is_over(), self._monitor.record
        self.exit_code = 0 if record.status == DONE else STOPPED_EXIT if record.can_go_on else 1
        if record is not self._record:  # the monitor has read it again
            self._record = record
            row = make_overview(record)
            left = f", {show_seconds(row.seconds_left)} left" if row.seconds_left else ""
            steps = f"{row.step or 0:,} of {row.total_steps or '?'} steps{left}"
            self.status, self.note = row.status, steps if row.status == RUNNING else row.detail
        return over

    def explain(self, prefix: str) -> None:
        """Say why it failed."""
        if self._monitor.record.status not in (DONE, STOPPED, DONE_UNSAVED, "cancelled"):
            runs.say_failure(self._monitor.folder, prefix)


class SweepTarget:
    """A sweep, and how far it is."""

    note = ""

    def __init__(self, folder: SweepFolder) -> None:
        self.name = folder.name
        self._folder = folder
        self._is_over = self._seemed_over = False
        self._next = 0.0

    def is_over(self) -> bool:
        """Whether all trials have ended. A trial that is requeued looks over for a moment, so any
        end but success is checked twice.
        """
        if not self._is_over and time.monotonic() >= self._next:
            self._next = time.monotonic() + SWEEP_REFRESH
            counts = read_sweep(self._folder).counts
            self.status = ", ".join(f"{count} {state}" for state, count in counts.items())
            self.exit_code = 0 if set(counts) <= {DONE, PRUNED} else 1
            seems_over = not {RUNNING, PENDING} & counts.keys()
            self._is_over = seems_over and (self.exit_code == 0 or self._seemed_over)
            self._seemed_over = seems_over
        return self._is_over

    def explain(self, prefix: str) -> None:
        """Say where its failures are."""
        if self.exit_code:
            text = f"paceline: {self.name}: {self.status}: {to_type(f'sweep show {self.name}')}"
            console.say(text, colour=console.RED)


Target = RunTarget | SweepTarget


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...", help="Runs or sweeps: ids, names, job ids, folders, or `last`."
        ),
    ] = None,
    *,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
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
    seconds = parse_timeout(timeout) if timeout else float("inf")
    found = [runs.run_or_sweep(name) for name in names or [runs.LAST]]
    targets: list[Target] = [
        SweepTarget(each) if isinstance(each, SweepFolder) else RunTarget(each) for each in found
    ]
    try:
        left = _wait(targets, time.monotonic() + seconds)
    except KeyboardInterrupt:
        console.say_note("only the wait has ended; runs continue")
        raise
    for target in targets:
        if target not in left:
            target.explain(target.name if len(targets) > 1 else "")
    if left:
        listed = ", ".join(f"{target.name} ({target.status})" for target in left)
        console.say_problem(
            f"Not known to have finished after {show_seconds(seconds)}: {listed}.",
            "Only the wait timed out; the runs continue. To be sure of an end, Paceline checks"
            " twice, a few seconds apart.",
        )
        return TIMEOUT_EXIT
    codes = {target.exit_code for target in targets}
    return 1 if 1 in codes else max(codes)


def parse_timeout(timeout: str) -> float:
    try:
        return parse_seconds(f"{timeout}s" if timeout.strip().isdigit() else timeout)
    except ValueError as expected:
        raise UsageError(f'Invalid --timeout "{timeout}": use {expected}.') from None


def _wait(targets: Sequence[Target], deadline: float) -> list[Target]:
    """Show the progress of runs until all are over, or the time is up. Return which are left.

    On a terminal it is a line that changes, and how each has ended; in a pipe, a line for each new
    status.
    """
    is_terminal = sys.stderr.isatty()
    pause = max(POLL_INTERVAL, len(targets) / MOST_LOOKS)
    said: dict[Target, str] = {}
    with console.console(stderr=True).status("") as line:
        while True:
            left = [target for target in targets if not target.is_over()]
            texts = [_describe(target) for target in targets]
            line.update(console.cell(" · ".join(texts)))
            for target in targets if not is_terminal else ():
                note = f" ({target.note})" if target.note and target.status != RUNNING else ""
                text = console.printable(f"{target.name}: {target.status}{note}")
                if said.get(target) != text:
                    said[target] = text
                    print(text, flush=True)
            until = min(pause, deadline - time.monotonic())
            if not left or until <= 0:
                break
            time.sleep(until)
    if is_terminal and not left:
        print(*map(console.printable, texts), sep="\n")
    return left


def _describe(target: Target) -> str:
    return f"{target.name}: {target.status}{target.note and f' ({target.note})'}"
