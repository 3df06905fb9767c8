"""Find the runs that a command names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options
from paceline.cluster.runs import folder as folders
from paceline.contract.env import ON_CLUSTER
from paceline.contract.run_folder import RunFolder
from paceline.errors import UsageError
from paceline.plan.quote import quote
from paceline.spec import Program, load_job

LAST = "last"  # the newest

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id, its start or end, name or its start, job id, folder, or `last`.")
]


def scratch_here() -> Path:
    """Return the scratch folder of runs that start from here."""
    return folders.resolve_scratch(load_job(Program(""), cluster=options.this_cluster(here=True)), os.environ)


def project_here() -> tuple[Path, str]:
    """Return the scratch folder and the project of runs that start from here."""
    job = load_job(Program(""), cluster=options.this_cluster(here=True))
    return folders.resolve_scratch(job, os.environ), job.project_name


def named(name: str) -> RunFolder:
    """Return a run to look at. Raises UsageError if there is none; for the name of a sweep, it says what to type."""
    return _find(name, folders.find_run, "See its trials with `paceline sweep show {sweep}`")


def own(name: str) -> RunFolder:
    """Return a run of this user's, to execute something of it, signal it or change it."""
    return _find(
        name,
        folders.find_own_run,
        "See its trials with `paceline sweep show {sweep}`, cancel them with `paceline sweep cancel {sweep}`",
    )


def _find(name: str, find: Callable[[str, Path], RunFolder], advice: str) -> RunFolder:
    scratch = scratch_here()
    try:
        return find(name, scratch)
    except UsageError as no_run:
        from paceline.sweep.overview import find_failed_trial
        from paceline.sweep.results import find_sweep

        try:
            sweep = find_sweep(name, scratch)
        except UsageError:
            raise no_run from None
        if name not in (sweep.name, LAST):  # it is a part of the name, and may be meant for a run
            raise no_run from None
        what = f"{name!r} is a sweep" if name != LAST else f"You have no runs in {scratch} but those of a sweep"
        trial = find_failed_trial(sweep)
        one = f", and read the output of one with `paceline logs {quote(trial.key)}`" if trial is not None else ""
        raise UsageError(f"{what}.", hint=f"{advice.format(sweep=quote(sweep.name))}{one}.") from None


def to_type(command: str) -> str:
    """Return a command for the user to type: on the laptop, if this one came from there."""
    cluster = os.environ.get(ON_CLUSTER)
    return f"paceline {command}{f' --on {quote(cluster)}' if cluster else ''}"


@contextmanager
def goes_on(folder: RunFolder) -> Iterator[None]:
    """After Ctrl-C in a command that only watches a run, say that the run goes on, and how to cancel it."""
    try:
        yield
    except KeyboardInterrupt:
        run = folder.key
        console.say_note(f"{run} goes on; watch it: paceline logs -f {run}; cancel it: paceline cancel {run}")
        raise


def say_failure(folder: RunFolder, name: str = "") -> None:
    """Print why a run failed: the first failing rank, its error and where it happened. `name` tells it from others."""
    from paceline.watch.failures import describe_failure

    before = f"paceline: {name}: " if name else "paceline: "
    for number, line in enumerate(describe_failure(folder)):
        console.say(line if number else f"{before}{line}", colour="" if number else console.RED)
