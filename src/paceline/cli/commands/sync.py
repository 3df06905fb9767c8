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
from paceline.launch import claims
from paceline.launch.wandb_sync import complete, find_python, is_empty, is_sent, offline_runs, send
from paceline.spec.file_owner import is_own_folder
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
    if all_runs:
        return _sync_all(dry_run=dry_run)
    folder = runs.own(run or "last", also_fetched=True)
    if not _unsent(folder):
        print(_nothing_to_send(folder, bool(offline_runs(folder))))
        return 0
    if not dry_run:
        _check_connection()
    _sync(folder, dry_run=dry_run)
    return 0


def _unsent(folder: RunFolder) -> list[Path]:
    return [path for path in offline_runs(folder) if not is_sent(path)]


def _sync_all(*, dry_run: bool) -> int:
    """Send every run of the project. One that cannot be sent does not keep the others from it."""
    scratch, project = runs.project_here()
    listed = (
        each for each in reversed(find_runs(scratch)) if each.path.parent.parent.name == project
    )
    folders = [each for each in listed if is_own_folder(each.path)]
    waiting = [each for each in folders if _unsent(each)]
    if not waiting:
        print(
            f"none of the {len(folders)} runs of {project} in {scratch} has anything to send to W&B"
        )
        return 0
    if not dry_run:
        _check_connection()
    failed = 0
    for folder in waiting:
        try:
            _sync(folder, dry_run=dry_run)
        except PacelineError as error:
            failed += 1
            console.say_note(f"{folder.path.name} is not sent: {error}")
    return 1 if failed else 0


def _sync(folder: RunFolder, *, dry_run: bool) -> None:
    if dry_run:
        for path in _unsent(folder):
            print(f"would send {path}")
        return
    claims.require_not_running(folder)
    python = find_python(folder)
    complete(folder, python=python)
    unsent = [path for path in offline_runs(folder) if not is_sent(path) and not is_empty(path)]
    for number, path in enumerate(unsent, start=1):
        console.say_note(f"sending {path.name} ({number} of {len(unsent)})")
        address = send(path, python=python)
        print(f"sent {path.name}{f' to {address}' if address else ''}", flush=True)


def _nothing_to_send(folder: RunFolder, has_sent: bool) -> str:
    if has_sent:
        return f"{folder.path.name}: everything has been sent to W&B"
    return f"{folder.path.name} has no offline W&B run (see --wandb of `paceline run`)"


def _check_connection() -> None:
    problem = wandb_server.missing_key(os.environ)
    if problem:
        raise EnvironmentProblem(f"Cannot send to W&B: {problem}.", hint=wandb_server.KEY_HINT)
    problem = wandb_server.unreachable(os.environ)
    if problem:
        raise EnvironmentProblem(
            f"Cannot send to W&B: {problem}.", hint="Run this on a machine with network access."
        )
