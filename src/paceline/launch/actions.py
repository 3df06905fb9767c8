"""What you can do to your own runs: cancel them, let them save and stop, requeue them."""

from __future__ import annotations

import os
import signal
import time

from paceline.contract.claims import ELSEWHERE, find_holder
from paceline.contract.environment_file import forget_secrets
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import UsageError
from paceline.slurm import commands as slurm
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.run_path import requeues_itself
from paceline.spec.shell_text import to_type
from paceline.spec.user_files import require_own_folder

CANCEL, STOP, REQUEUE = "cancel", "stop", "requeue"  # as the views of runs name them


def cancel_run(folder: RunFolder, *, running: bool, save: bool = False) -> None:
    """Cancel a run for good: it is not requeued. A local run always saves first, a job only if it
    is running.

    Raises UsageError if the run is another user's, or runs on a host that this one cannot signal.
    """
    require_own_folder(folder.path, "Run")
    job, holder = slurm.read_job_id(folder), find_holder(folder)
    if job is not None and save and running:
        slurm.request_stop(folder, job)
    elif job is not None:
        slurm.cancel(folder, job)
        forget_secrets(folder.environment)  # a job that was still queued does not do so itself
    elif holder is not None and holder.job is None and holder.whereabouts() == ELSEWHERE:
        raise UsageError(
            f"Run {folder.path.name} was started on {holder.host}, which this host cannot signal.",
            hint="Run this command there.",
        )
    else:
        write_atomically(folder.cancelled, f"{time.time():.0f}\n")
        if holder is not None and (pids := holder.pids()):
            os.kill(pids[0], signal.SIGTERM)  # the command that started it asks its agents to stop


def requeue_run(folder: RunFolder, *, running: bool, over: bool) -> str:
    """Put a run of Slurm back into the queue, and return its job.

    A running job saves a checkpoint and requeues itself, as before its time limit. A run that is
    over is submitted again, with the code and the settings that it had. Raises UsageError for all
    others.
    """
    require_own_folder(folder.path, "Run")
    run, job = folder.path.name, slurm.read_job_id(folder)
    if job is None:
        raise UsageError(
            f"Run {run} is not a Slurm job.",
            hint=f"Continue it with `paceline run --resume {run}`.",
        )
    if over:
        from paceline.launch.resume import Typed, find_earlier_run
        from paceline.launch.slurm_job import SlurmJob

        found, earlier, _ = find_earlier_run(
            str(folder.path), None, typed=Typed(), here=load_job(Program("")), backend="slurm"
        )
        again = SlurmJob(found, earlier=earlier)
        again.check()
        return str(again.submit(["paceline", "submit", "--resume", run]).job_id)
    if not running:
        raise UsageError(f"Run {run} is already in the queue as job {job}.")
    if not requeues_itself(folder):
        raise UsageError(
            f"Run {run} does not requeue itself (requeue = false in [resume]).",
            hint=f"Let it save and stop, then use `{to_type(f'submit --resume {run}')}`.",
        )
    slurm.request_requeue(job)
    return job
