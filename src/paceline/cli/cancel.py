"""`paceline cancel`: end a run, and keep it ended."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated

import psutil
import typer

from paceline.cli import runs
from paceline.cluster.slurm import commands as slurm
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.verdict import DONE, STOPPED
from paceline.watch.records import Record, newest_job_start, newest_verdict, read_record

Names = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs: id, end of an id, folder, or `last`.")
]


def command(
    names: Names,
    *,
    save: Annotated[bool, typer.Option("--save", help="Let the ranks write a checkpoint first.")] = False,
) -> int:
    """End runs, and keep them ended: nothing requeues them.

    A run is marked before its job is told, so that nothing resurrects it. To let it go on later, remove the
    file `cancelled` from its folder.
    """
    for folder in [runs.named(name) for name in names]:
        record = read_record(folder)
        if record.is_over and not _may_come_back(record):
            print(f"{record.run_id} is over already: {record.status}")
        elif record.job is None:
            _end_here(folder)
            print(f"asked {record.run_id} to save and stop")
        else:
            _end_job(folder, record, save=save)
            print(f"cancelled {record.run_id} (job {record.job}){', once it has saved' if save else ''}")
    return 0


def _may_come_back(record: Record) -> bool:
    """A job that is on its way back into the queue looks as if it had ended."""
    if record.job is None or record.status in (DONE, "cancelled"):
        return False
    return record.status in ("preempted", "node failed") or newest_verdict(record.folder) == STOPPED


def _end_job(folder: RunFolder, record: Record, *, save: bool) -> None:
    assert record.job is not None
    if save and record.status == "running":
        slurm.request_stop(folder, record.job)
    else:
        slurm.cancel(folder, record.job)


def _end_here(folder: RunFolder) -> None:
    """The command that started the run passes the request on to its agents."""
    write_atomically(folder.cancelled, f"{time.time():.0f}\n")
    job_start = newest_job_start(folder)
    pid = int(job_start.name.removeprefix("pid-")) if job_start else 0
    try:
        is_ours = pid > 0 and any("paceline" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        is_ours = False
    if is_ours:
        os.kill(pid, signal.SIGTERM)
