"""What you can do to a run from a view, what is asked before, and what happens after a yes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.contract.run_folder import DONE, RunFolder
from paceline.errors import UsageError
from paceline.launch.actions import CANCEL, REQUEUE, STOP, cancel_run, requeue_run
from paceline.slurm import squeue_and_sacct
from paceline.spec.user_files import is_own_folder
from paceline.watch import origin
from paceline.watch.failure import resume_command
from paceline.watch.overview import Overview
from paceline.watch.records import read_record

VERBS = (CANCEL, STOP, REQUEUE)


@dataclass(frozen=True)
class Question:
    """What a person has to agree to before something is done to a run."""

    verb: str
    run: Overview
    text: str
    consequence: str
    yes: str


def act(folder: RunFolder, verb: str) -> str:
    """Do it, and return what was done. Raises a PacelineError if it cannot be done."""
    if verb not in VERBS:
        raise UsageError(f"Unknown action {verb[:50]!r}.")
    if (copy := origin.shown()) is not None:  # it happens where the run is
        return copy.act(verb, folder.key)
    # as it is now: what a view shows may be a minute old
    record = read_record(folder, squeue_and_sacct.states)
    running = record.status == "running"
    if verb == REQUEUE:
        job = requeue_run(folder, running=running, over=record.is_over)
        done = "submitted again" if record.is_over else "saves and requeues itself"
        return f"{folder.key}: {done}, job {job}"
    if record.is_over:
        raise UsageError(f"{folder.key} has already ended: {record.status}.")
    cancel_run(folder, running=running, save=verb == STOP)
    saves = record.job is None or (verb == STOP and running)
    return f"{folder.key} {'saves and stops' if saves else 'is cancelled'}."


def allowed_verbs(run: Overview) -> list[str]:
    """Return what you can do to a run now."""
    if not is_own_folder(Path(run.path)):
        return []
    if run.is_over:  # a trial is run again by its sweep
        return [REQUEUE] if run.job and run.status != DONE and run.trial is None else []
    if not run.job:
        return [STOP]
    return [STOP, REQUEUE, CANCEL] if run.status == "running" else [CANCEL]


def find_question(verb: str, run: Overview) -> Question | str:
    """Return what to ask before this is done to a run, or why it is not possible."""
    name, again = run.key, resume_command(RunFolder(Path(run.path)), job=run.job or None)
    if not is_own_folder(Path(run.path)):
        return f"Run {name} belongs to another user; you can only view it."
    if verb == CANCEL and not run.job:
        verb = STOP
    if verb not in allowed_verbs(run):
        if verb == REQUEUE:
            return f"Run {name} is {run.status} and cannot be requeued. " + (
                f"To continue it: {again}"
                if run.is_over or not run.job
                else f"It is job {run.job}."
            )
        if run.is_over:
            return f"Run {name} has already ended: {run.status}."
        return f"Run {name} is not running yet, so it has nothing to save. To cancel it, press c."
    job = f"job {run.job}" if run.job else "a local run"
    title = f"run {name} ({run.name or run.program.rpartition('/')[2]}, {job})"
    if verb == REQUEUE and run.is_over:
        text = "It continues from its newest checkpoint, as a new job with the same code."
        return Question(verb, run, f"Submit {title} again?", text, "Submit again")
    text, ask, yes = {
        REQUEUE: (
            "It saves a checkpoint, is requeued, and continues when the job starts again.",
            f"Requeue {title}?",
            "Requeue",
        ),
        STOP: (
            f"It saves a checkpoint first. To continue it later: {again}",
            f"Let {title} save and stop?",
            "Save and stop",
        ),
        CANCEL: (
            "Steps since its last checkpoint are lost, and it is not requeued. To save, press s.",
            f"Cancel {title} now?",
            "Cancel the run",
        ),
    }[verb]
    return Question(verb, run, ask, text, yes)
