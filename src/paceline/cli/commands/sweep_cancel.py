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
    pids = {pid for path in sweep.trials.glob("*") for pid in find_pids(RunFolder(path))}
    counts = read_sweep(sweep, squeue_and_sacct.states).counts
    if counts and not pids and not counts.keys() & {RUNNING, PENDING, MISSING}:
        ended = ", ".join(f"{count:,} {state}" for state, count in counts.items())
        print(f"{sweep.name} has already ended: {ended}")
        return 0
    # Marked first, so that no trial starts in the meantime.
    write_atomically(sweep.cancelled, f"{time.time():.0f}\n")
    for pid in pids:
        with suppress(ProcessLookupError):  # it just ended
            os.kill(pid, signal.SIGTERM)  # it stops the agents of its trials
    jobs = {str(line["job"]) for line in sweep.read_jobs()}
    # The folder of a trial that continues in another job names that job.
    others = {job for path in sweep.trials.glob("*/job") if (job := path.read_text().strip())}
    jobs |= {job for job in others if job.partition("_")[0] not in jobs}
    if jobs:
        slurm.cancel_jobs(sorted(jobs))
    print(f"cancelled {sweep.name}")
    return 0
