"""`paceline sync`: send a run's offline W&B files from a machine with network access."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.cluster.runs import claims
from paceline.cluster.runs.wandb_sync import complete, find_python, is_empty, is_sent, offline_runs, send
from paceline.contract import wandb_server
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem


def command(
    run: runs.Run = "last",
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent, and send nothing.")] = False,
) -> int:
    """Send the W&B data of a run that had no network or no key.

    \b
    paceline sync              the newest run
    paceline sync 1a2b         the run whose id ends in 1a2b
    paceline sync --dry-run    list what would be sent

    All parts of a run that was stopped and resumed go to one W&B run. Nothing is sent twice.
    TensorBoard needs no sync: tensorboard --logdir RUN-FOLDER/trackers/tensorboard
    """
    folder = runs.named(run)
    runs_found = offline_runs(folder)
    unsent = [path for path in runs_found if not is_sent(path)]
    if not unsent:
        print(_nothing_to_send(folder, bool(runs_found)))
        return 0
    if dry_run:
        for path in unsent:
            print(f"would send {path}")
        return 0
    claims.require_not_running(folder)
    _check_connection()
    python = find_python(folder)
    complete(folder, python=python)
    unsent = [path for path in offline_runs(folder) if not is_sent(path) and not is_empty(path)]
    for number, path in enumerate(unsent, start=1):
        console.say_note(f"sending {path.name} ({number} of {len(unsent)})")
        address = send(path, python=python)
        print(f"sent {path.name}{f' to {address}' if address else ''}", flush=True)
    return 0


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
        raise EnvironmentProblem(f"Cannot send to W&B: {problem}.", hint="Run this on a machine with network access.")
