"""`paceline sync`: send a run's offline W&B files from a machine with network access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, runs, typer_options
from paceline.contract import wandb_server
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem, PacelineError, UsageError
from paceline.launch import run_folder as claims
from paceline.launch.wandb_sync import find_python, send, unsent_runs
from paceline.spec.user_files import is_own_folder
from paceline.watch.records import find_runs


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help=runs.RUN_HELP)] = None,
    *,
    all_runs: Annotated[bool, typer.Option("--all", help="Send all runs of this project.")] = False,
    dry_run: typer_options.DryRun = False,
) -> int:
    """Send the W&B data of a run that had no network or no key.

    \b
      paceline sync              the newest run
      paceline sync 1a2b         the run whose id ends in 1a2b
      paceline sync --all        all runs of this project that are over
      paceline sync --dry-run    list what would be sent

    All parts of a run that was stopped and resumed go to one W&B run. Nothing is sent twice.
    TensorBoard needs no sync: tensorboard --logdir RUN-FOLDER/trackers/tensorboard
    """
    if all_runs and run is not None:
        raise UsageError(
            f"--all cannot be combined with a run ({run}).", hint="Use only one of them."
        )
    folders = _all_runs() if all_runs else [runs.own(run or "last", also_fetched=True)]
    unsent = {each: unsent_runs(each) for each in folders}
    if not any(unsent.values()):
        which = f"{len(folders)} runs" if all_runs else folders[0].path.name
        print(f"{which}: there is nothing to send to W&B")
        return 0
    if dry_run:
        for path in (path for paths in unsent.values() for path in paths):
            print(f"would send {path}")
        return 0
    problem = wandb_server.missing_key(os.environ) or wandb_server.unreachable(os.environ)
    if problem:
        raise EnvironmentProblem(
            f"Cannot send to W&B: {problem}.",
            hint=f"Run this on a machine with network access. {wandb_server.KEY_HINT}",
        )
    failed = False
    for folder in (each for each in folders if unsent[each]):
        try:
            _send(folder, unsent[folder])
        except PacelineError as error:
            if not all_runs:
                raise
            failed = True
            console.say_note(f"{folder.path.name} is not sent: {error}")
    return 1 if failed else 0


def _all_runs() -> list[RunFolder]:
    """Return this user's runs of the project, the oldest first."""
    scratch, project = runs.project_here()
    found = [each for each in find_runs(scratch) if each.path.parent.parent.name == project]
    return [each for each in reversed(found) if is_own_folder(each.path)]


def _send(folder: RunFolder, unsent: list[Path]) -> None:
    claims.require_not_running(folder)
    python = find_python(folder)
    for number, path in enumerate(unsent, start=1):
        console.say_note(f"sending {path.name} ({number} of {len(unsent)})")
        address = send(path, python=python)
        print(f"sent {path.name}{f' to {address}' if address else ''}", flush=True)
