"""`paceline wait`: wait for runs to finish."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.cli.views.wait_progress import ProgressBars, ProgressLines
from paceline.cli.views.wait_targets import RunTarget, SweepTarget, Target
from paceline.contract.quote import quote
from paceline.contract.sweep.folder import SweepFolder
from paceline.contract.verdict import STOPPED_EXIT
from paceline.errors import UsageError
from paceline.spec.quantities import parse_wait, show_seconds
from paceline.sweep.results import find_sweep

TIMEOUT = "--timeout"
TIMEOUT_EXIT = 124  # as that of timeout(1)
POLL_INTERVAL = 0.5  # seconds between looks at the files of a run
MOST_LOOKS = 50  # per second, at all runs together

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Runs or sweeps: ids, names, job ids, folders, or `last`."),
]


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

    0: all are done. 1: one has failed, was cancelled or is lost. 75: one was stopped, perhaps by `cancel --save`, and
    can be resumed. 124: --timeout has passed. 130: Ctrl-C; the runs continue.

    \b
      paceline wait 1a2b && paceline export 1a2b
      paceline wait --timeout 2h 1a2b 3c4d
      paceline wait my-sweep            all trials of a sweep
    """
    deadline = _deadline(timeout)
    targets = [_find(name) for name in names or ["last"]]
    try:
        is_over = _wait(targets, deadline)
    except KeyboardInterrupt:
        for target in targets:
            if not target.seems_over:
                console.say_note(f"{target.name} keeps running")
        raise
    for target in targets:
        target.explain(with_name=len(targets) > 1)
    if not is_over:
        _say_left(
            [target for target in targets if not target.is_over],
            show_seconds(parse_wait(timeout, TIMEOUT)),
        )
        return TIMEOUT_EXIT
    codes = {target.exit_code for target in targets}
    return 1 if 1 in codes else STOPPED_EXIT if STOPPED_EXIT in codes else 0


def _say_left(targets: list[Target], waited: str) -> None:
    """Say which runs are not over, and which look so, but may be on their way back into the queue."""
    left = ", ".join(target.name for target in targets if not target.seems_over)
    unsure = ", ".join(
        f"{target.name} ({target.progress.status})" for target in targets if target.seems_over
    )
    if left:
        console.say_problem(
            f"Not finished after {waited}: {left}.", "Only the wait timed out; the runs continue."
        )
    if unsure:
        hint = (
            "Paceline checks twice, a few seconds apart, because a job that is being requeued briefly looks"
            " finished. Use a longer --timeout."
        )
        console.say_problem(
            f"Could not confirm within {waited} that these runs have finished: {unsure}.", hint
        )


def _wait(targets: list[Target], deadline: float | None) -> bool:
    """Show the progress of runs until all are over. Return False if the time is up before."""
    shown = ProgressBars(targets) if sys.stderr.isatty() else ProgressLines(targets)
    pause = max(POLL_INTERVAL, len(targets) / MOST_LOOKS)
    with shown:
        while True:
            for target in targets:
                target.update()
            shown.update()
            if all(target.is_over for target in targets):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            time.sleep(max(0.0, left))


def _deadline(timeout: str) -> float | None:
    return time.monotonic() + parse_wait(timeout, TIMEOUT) if timeout else None


def _find(name: str) -> Target:
    """Return the run or the sweep that a name means. The whole name of a sweep is more than the start of a run's."""
    try:
        run = RunTarget(runs.named(name), name)
    except UsageError as no_run:
        return SweepTarget(_find_sweep(name, no_run))
    if run.name == run.key:  # not called by its name
        return run
    try:
        sweep = _find_sweep(name, UsageError(""))
    except UsageError:
        return run
    if sweep.name != name:
        return run
    if run.name == name:
        one, all_trials = run.key, quote(str(sweep.path))
        raise UsageError(
            f"{name!r} is the name of a run and of a sweep.",
            hint=f"Wait for the run with `paceline wait {one}`, or for the sweep with `paceline wait {all_trials}`.",
        )
    return SweepTarget(sweep)


def _find_sweep(name: str, no_run: UsageError) -> SweepFolder:
    try:
        return find_sweep(name, runs.scratch_here())
    except UsageError:
        raise no_run from None
