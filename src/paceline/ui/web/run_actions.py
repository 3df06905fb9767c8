"""What a page may do to a run of yours, if the server was started with `--allow-actions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.contract.files.file_owner import is_own_folder
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE
from paceline.errors import UsageError
from paceline.launch.actions import CANCEL, REQUEUE, STOP, cancel_run, requeue_run
from paceline.slurm.job_states import squeue_and_sacct
from paceline.watch import origin
from paceline.watch.records import read_record

VERBS = (CANCEL, STOP, REQUEUE)


def allowed_verbs(folder: RunFolder, row: Mapping[str, Any]) -> list[str]:
    """Return what you can do to a run now, from its row."""
    if not is_own_folder(folder.path):
        return []
    job, status = row["job"], row["status"]
    if row["is_over"]:  # a trial is run again by its sweep
        return [REQUEUE] if job and status != DONE and row["trial"] is None else []
    if not job:
        return [STOP]
    return [STOP, REQUEUE, CANCEL] if status == "running" else [CANCEL]


def act(folder: RunFolder, verb: str) -> str:
    """Do it, and return what was done. Raises UsageError if the run is another user's, or if it
    cannot be done.
    """
    if (view := origin.shown()) is not None:  # it happens where the run is
        return view.act(verb, folder.key)
    # as it is now: a job of a minute ago may have ended
    record = read_record(folder, squeue_and_sacct.states)
    run, running = folder.key, record.status == "running"
    if verb == REQUEUE:
        return (
            f"{run} is requeued as job {requeue_run(folder, running=running, over=record.is_over)}."
        )
    if record.is_over:
        raise UsageError(f"{run} has already ended: {record.status}.")
    cancel_run(folder, running=running, save=verb == STOP)
    if record.job is None or (verb == STOP and running):
        return f"{run} saves and stops."
    return f"{run} is cancelled."
