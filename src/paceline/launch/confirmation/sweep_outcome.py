"""What a submission of a sweep's trials has led to. If its command was killed, a job may be there
and not recorded.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.run_folder import SUBMITTING, write_atomically
from paceline.contract.sweep.folder import SUBMITTED, SweepFolder
from paceline.slurm.sbatch import find_job


@dataclass(frozen=True)
class SweepOutcome:
    """The jobs of a submission, how many trials they run, and how many of its trials have no
    job.
    """

    sweep: SweepFolder
    jobs: Sequence[str]
    trials: int
    missing: int


def find_sweep(folder: Path, trials: Sequence[int]) -> SweepOutcome | None:
    """Return the jobs of a submission's folder, which was to run `trials`; None if there is none,
    and none will come.

    Raises NoAnswer if Slurm does not say whether there is a job.
    """
    if not folder.is_dir():  # its command was interrupted, and has undone what it did
        return None
    sweep = SweepFolder(folder.parent.parent)
    if not (folder / SUBMITTED).exists():
        _record_last_job(sweep, folder)
    lines = [line for line in sweep.read_jobs() if line.get("submission") == folder.name]
    if not lines:
        if not (folder / SUBMITTING).exists():
            shutil.rmtree(folder, ignore_errors=True)  # it has secrets
        return None
    write_atomically(folder / SUBMITTED, "")
    count = sum(len(numbers) for line in lines for numbers in line["tasks"].values())
    return SweepOutcome(
        sweep, [str(line["job"]) for line in lines], count, max(0, len(trials) - count)
    )


def _record_last_job(sweep: SweepFolder, folder: Path) -> None:
    """Look for the job of the last call of sbatch. If it is not there, it ends at once should it
    come later.
    """
    jobs = [str(line["job"]) for line in sweep.read_jobs() if line.get("submission") == folder.name]
    listing = folder / f"tasks-{len(jobs) + 1}"
    cancelled = folder / f"cancelled-{listing.name}"
    if not listing.exists() or cancelled.exists():
        return
    job = find_job(folder, os.environ, known=jobs, pauses=(0.0, 1.0))
    if job is None:
        write_atomically(cancelled, f"{time.time():.0f}\n")
        return
    rows = [line.split() for line in listing.read_text(encoding="utf-8").splitlines()]
    tasks = {int(row[0]): [int(number) for number in row[1:]] for row in rows}
    sweep.record_job(job, submission=folder.name, tasks=tasks)
    (folder / SUBMITTING).unlink(missing_ok=True)
