"""Find the runs that a command names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options
from paceline.cluster.runs import folder as folders
from paceline.contract.run_folder import RunFolder
from paceline.spec import Program, load_job

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
    """Return a run to look at."""
    return folders.find_run(name, scratch_here())


def own(name: str) -> RunFolder:
    """Return a run of this user's, to execute something of it, signal it or change it."""
    return folders.find_own_run(name, scratch_here())


@contextmanager
def goes_on(folder: RunFolder) -> Iterator[None]:
    """After Ctrl-C in a command that only watches a run, say that the run goes on, and how to cancel it."""
    try:
        yield
    except KeyboardInterrupt:
        run = folder.path.name
        console.say_note(f"{run} goes on; watch it: paceline logs -f {run}; cancel it: paceline cancel {run}")
        raise


def say_failure(folder: RunFolder) -> None:
    """Print why a run failed: the first failing rank, its error and where it happened."""
    from paceline.watch.failures import describe_failure

    for number, line in enumerate(describe_failure(folder)):
        console.say(line if number else f"paceline: {line}", colour="" if number else console.RED)
