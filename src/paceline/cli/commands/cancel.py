"""`paceline cancel`: cancel runs permanently."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import runs
from paceline.contract.run_folder import DONE, STOPPED
from paceline.launch.actions import cancel_run
from paceline.slurm import squeue_and_sacct
from paceline.watch.failure import describe_start, resume_command
from paceline.watch.records import Record, read_record
from paceline.watch.run_status import newest_verdict

Names = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run ids or names, job ids, folders, or `last`."),
]


def command(
    names: Names,
    *,
    save: Annotated[
        bool, typer.Option("--save", help="Let the ranks write a checkpoint first.")
    ] = False,
) -> int:
    """Cancel runs for good: a cancelled run is not requeued.

    `paceline submit --resume RUN` resumes a run of Slurm, and `paceline run --resume RUN` a local one.

    \b
      paceline cancel 1a2b
      paceline cancel --save last    save a checkpoint first
    """
    for folder in [runs.own(name) for name in names]:
        # as it is now: a job of a minute ago may have ended
        record = read_record(folder, squeue_and_sacct.states)
        # a local run always saves
        saves = record.status == "running" and (save or record.job is None)
        if record.is_over and not _may_requeue(record):
            print(f"{folder.key} has already ended: {record.status}")
        else:
            cancel_run(folder, running=record.status == "running", save=save)
            done = "cancelling {} (job {}): it saves first" if save else "cancelled {} (job {})"
            if record.job is None:
                done = "asked {} to save and stop"
            print(done.format(folder.key, record.job))
        if record.status != DONE and (again := resume_command(folder, job=record.job)):
            begin = "from where it stops" if saves else describe_start(folder)
            if record.status == "running" and not saves:  # Slurm gives the ranks some seconds
                begin += ", unless the ranks can still save"
            print(f"  continue  {again}  ({begin})")
    return 0


def _may_requeue(record: Record) -> bool:
    """Whether a job that looks over may be on its way back into the queue."""
    if record.job is None or record.status in (DONE, "cancelled"):
        return False
    return record.status in ("preempted", "node failed") or newest_verdict(record.folder) == STOPPED
