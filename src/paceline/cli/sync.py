"""`paceline sync`: what a run kept for W&B, sent from a machine that has a network."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.cluster.runs import folder as folders
from paceline.cluster.runs.wandb_sync import complete, is_empty, is_sent, kept_runs, python_with_wandb, send
from paceline.contract import wandb_server
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem


def command(
    run: runs.Run = "last",
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")
    ] = False,
) -> int:
    """Send what a run kept for W&B because there was no network or no key where it ran.

    \b
    paceline sync              the newest run
    paceline sync 1a2b         the run whose id ends so
    paceline sync --dry-run    only say what is there

    A run that was stopped and went on is one run in W&B, too. What has been sent is marked, and not sent again.
    TensorBoard's files need no sending: tensorboard --logdir RUN-FOLDER/trackers/tensorboard
    """
    folder = runs.named(run)
    kept = kept_runs(folder)
    waiting = [each for each in kept if not is_sent(each)]
    if not waiting:
        print(_nothing(folder, bool(kept)))
        return 0
    if dry_run:
        for each in waiting:
            print(f"would send {each}")
        return 0
    folders.require_not_running(folder)
    _check_connection()
    python = python_with_wandb(folder)
    complete(folder, python=python)
    waiting = [each for each in kept_runs(folder) if not is_sent(each) and not is_empty(each)]
    for number, each in enumerate(waiting, start=1):
        console.say_note(f"sending {each.name} ({number} of {len(waiting)})")
        address = send(each, python=python)
        print(f"sent {each.name}{f' to {address}' if address else ''}", flush=True)
    return 0


def _nothing(folder: RunFolder, has_sent: bool) -> str:
    if has_sent:
        return f"{folder.path.name}: all that was kept for W&B has been sent"
    return f"{folder.path.name} has kept nothing for W&B (see --wandb of `paceline run`)"


def _check_connection() -> None:
    problem = wandb_server.missing_key(os.environ)
    if problem:
        raise EnvironmentProblem(f"W&B: {problem}", hint=wandb_server.KEY_HINT)
    problem = wandb_server.unreachable(os.environ)
    if problem:
        raise EnvironmentProblem(f"W&B: {problem}", hint="type this on a machine that has a network")
