"""`paceline cancel`: cancel runs for good."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import typer

from paceline.cli import runs
from paceline.cli.resume_hint import describe_start, resume_command
from paceline.cluster.runs.claims import ELSEWHERE, find_holder
from paceline.cluster.runs.environment_file import forget_secrets
from paceline.cluster.slurm import commands as slurm
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.verdict import DONE, STOPPED
from paceline.errors import UsageError
from paceline.watch.records import Record, newest_verdict, read_record

Names = Annotated[list[str], typer.Argument(metavar="RUN", help="Run ids, ends of ids, folders, or `last`.")]


def command(
    names: Names,
    *,
    save: Annotated[bool, typer.Option("--save", help="Let the ranks write a checkpoint first.")] = False,
) -> int:
    """Cancel runs for good: a cancelled run is not requeued.

    `paceline submit --resume RUN` goes on with a run of Slurm, and `paceline run --resume RUN` with a local one.

    \b
      paceline cancel 1a2b
      paceline cancel --save last    save a checkpoint first
    """
    for folder in [runs.own(name) for name in names]:
        record = read_record(folder)
        if record.is_over and not _may_requeue(record):
            print(f"{record.run_id} is over already: {record.status}")
        elif record.job is None:
            _cancel_here(folder)
            print(f"asked {record.run_id} to save and stop")
        else:
            _cancel_job(folder, record, save=save)
            print(f"cancelled {record.run_id} (job {record.job}){', once it has saved' if save else ''}")
        if record.status != DONE:
            saves = save or (record.job is None and not record.is_over)  # a local run always saves
            where = "" if saves else f"  ({describe_start(folder)})"
            print(f"  to go on  {resume_command(folder, job=record.job)}{where}")
    return 0


def _may_requeue(record: Record) -> bool:
    """Whether a job that looks over may be on its way back into the queue."""
    if record.job is None or record.status in (DONE, "cancelled"):
        return False
    return record.status in ("preempted", "node failed") or newest_verdict(record.folder) == STOPPED


def _cancel_job(folder: RunFolder, record: Record, *, save: bool) -> None:
    assert record.job is not None
    if save and record.status == "running":
        slurm.request_stop(folder, record.job)
    else:
        slurm.cancel(folder, record.job)
        forget_secrets(folder.environment)  # a job that was still queued does not do so itself


def _cancel_here(folder: RunFolder) -> None:
    """Signal the command that started the run; it asks its agents to stop."""
    holder = find_holder(folder)
    if holder is not None and holder.job is None and holder.whereabouts() == ELSEWHERE:
        raise UsageError(
            f"Run {folder.path.name} was started on {holder.host}, which this host cannot signal.",
            hint="Run this command there.",
        )
    write_atomically(folder.cancelled, f"{time.time():.0f}\n")
    if holder is not None and (pids := holder.pids()):
        os.kill(pids[0], signal.SIGTERM)
