"""`paceline sweep cancel`: cancel all trials of a sweep."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Annotated

import typer

from paceline.cli import runs
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.contract.sweep_folder import SweepFolder
from paceline.slurm import commands as slurm
from paceline.slurm import squeue_and_sacct
from paceline.sweep.folder import find_pids
from paceline.sweep.results import MISSING, PENDING, RUNNING, find_own_sweep, read_sweep


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The sweep's name or folder, or `last`.")
    ],
) -> int:
    """Cancel a sweep: stop its running trials, and start no more.

    It stays cancelled until you continue it: paceline sweep --resubmit missing NAME
    """
    sweep = find_own_sweep(name, runs.scratch_here())
    if ended := _ended_trials(sweep):
        print(f"{sweep.name} has already ended: {ended}")
        return 0
    # Marked first, so that no trial starts in the meantime.
    write_atomically(sweep.cancelled, f"{time.time():.0f}\n")
    for pid in _pids(sweep):
        with suppress(ProcessLookupError):  # it just ended
            os.kill(pid, signal.SIGTERM)  # it stops the agents of its trials
    if jobs := _jobs(sweep):
        slurm.cancel_jobs(jobs)
    print(f"cancelled {sweep.name}")
    return 0


def _ended_trials(sweep: SweepFolder) -> str:
    """Return how the trials of a sweep ended, if nothing of it is left that could be cancelled; else nothing."""
    counts = read_sweep(sweep, squeue_and_sacct.states).counts
    if not counts or counts.keys() & {RUNNING, PENDING, MISSING} or _pids(sweep):
        return ""
    return ", ".join(f"{count:,} {state}" for state, count in counts.items())


def _pids(sweep: SweepFolder) -> set[int]:
    return {pid for path in sweep.trials.glob("*") for pid in find_pids(RunFolder(path))}


def _jobs(sweep: SweepFolder) -> list[str]:
    jobs = [str(line["job"]) for line in sweep.read_jobs()]
    # The folder of a trial that continues in another job names that job.
    others = {job for path in sweep.trials.glob("*/job") if (job := path.read_text().strip())}
    return [*jobs, *sorted(job for job in others if job.partition("_")[0] not in jobs)]
