"""Find the runs that a command names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, typer_options
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import UsageError
from paceline.launch import run_folder as folders
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.shell_text import quote, to_type
from paceline.watch import origin

LAST = "last"  # the newest

RUN_HELP = "Run id or name (or the start of either), end of the id, job id, folder, or `last`."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]


def scratch_here() -> Path:
    """Return the scratch folder of runs that start from here, or the copy of a cluster's that is shown."""
    if (copy := origin.shown()) is not None:
        return copy.scratch
    return project_here()[0]


def project_here() -> tuple[Path, str]:
    """Return the scratch folder and the project of runs that start from here."""
    job = load_job(Program(""), cluster=typer_options.this_cluster(here=True))
    return folders.resolve_scratch(job, os.environ), job.project_name


def run_or_sweep(name: str) -> RunFolder | SweepFolder:
    """Return the run that a name means, or else the sweep. Raises UsageError if there is none."""
    scratch = scratch_here()
    sweep = _sweep_called(name, scratch)
    # the whole name of a sweep is more than the start of a run's
    if sweep is not None and sweep.name == name:
        return sweep
    try:
        return folders.find_run(name, scratch)
    except UsageError:
        if sweep is None:
            raise
        return sweep


def _sweep_called(name: str, scratch: Path) -> SweepFolder | None:
    from paceline.sweep.results import find_sweep

    try:
        return find_sweep(name, scratch)
    except UsageError:
        return None


def named(name: str) -> RunFolder:
    """Return a run to look at. Raises UsageError if there is none; for the name of a sweep, it says what to type."""
    return _find(name, folders.find_run)


def own(name: str, *, also_fetched: bool = False) -> RunFolder:
    """Return a run of this user's, to execute something of it, signal it or change it."""
    return _find(name, functools.partial(folders.find_own_run, also_fetched=also_fetched))


def _find(name: str, find: Callable[[str, Path], RunFolder]) -> RunFolder:
    scratch = scratch_here()
    try:
        return find(name, scratch)
    except UsageError:
        sweep = _sweep_called(name, scratch)
        # a part of a sweep's name may be meant for a run
        if sweep is None or name not in (sweep.name, LAST):
            raise
    show, cancel = (to_type(f"sweep {verb} {quote(sweep.name)}") for verb in ("show", "cancel"))
    raise UsageError(
        f"{name!r} is a sweep.",
        hint=f"See its trials with `{show}`, cancel them with `{cancel}`, or name one, as in"
        f" {quote(f'{sweep.name}-0')}.",
    )


@contextmanager
def goes_on(folder: RunFolder) -> Iterator[None]:
    """After Ctrl-C in a command that only watches a run, say that the run keeps running, and how to cancel it."""
    try:
        yield
    except KeyboardInterrupt:
        run = folder.key
        watch, cancel = to_type(f"logs -f {run}"), to_type(f"cancel {run}")
        console.say_note(f"{run} keeps running; watch it: {watch}; cancel it: {cancel}")
        raise


def say_failure(folder: RunFolder, name: str = "") -> None:
    """Print why a run failed: the first failing rank, its error and where it happened. `name` tells it from others."""
    from paceline.watch.failure import describe_failure

    before = f"paceline: {name}: " if name else "paceline: "
    for number, line in enumerate(describe_failure(folder)):
        console.say(line if number else f"{before}{line}", colour="" if number else console.RED)
