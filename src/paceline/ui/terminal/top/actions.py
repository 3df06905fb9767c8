"""The questions before something happens to a run, and what happens after a yes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.contract.quote import quote
from paceline.contract.run_folder import RunFolder
from paceline.contract.typed_command import to_type
from paceline.launch.actions import REQUEUE, STOP, cancel_run, requeue_run
from paceline.slurm.job_states import squeue_and_sacct
from paceline.ui.terminal.top.data.rows import Row
from paceline.ui.terminal.top.text.words import plain
from paceline.watch import origin
from paceline.watch.failure import resume_command
from paceline.watch.overview import Overview
from paceline.watch.records import read_record


@dataclass(frozen=True)
class Action:
    """Something to do to a run once the user has agreed."""

    kind: str
    run: Overview
    question: str
    consequence: str
    yes: str

    def act(self) -> str:
        """Do it, and return what was done. Raises PacelineError if it is not possible."""
        if (view := origin.shown()) is not None:  # it happens where the run is
            return plain(view.act(self.kind, self.run.key))
        folder, name = RunFolder(Path(self.run.path)), plain(self.run.key)
        # as it is now: what the table shows may be a minute old
        record = read_record(folder, squeue_and_sacct.states)
        running = record.status == "running"
        if self.kind == REQUEUE:
            job = requeue_run(folder, running=running, over=record.is_over)
            return f"{name}: {'submitted' if record.is_over else 'saves and requeues itself'}, job {job}"
        if record.is_over:
            return f"Run {name} has already ended: {plain(record.status)}."
        cancel_run(folder, running=running, save=self.kind == STOP)
        return (
            f"{name}: {'saves and stops' if self.kind == STOP or not record.job else 'cancelled'}"
        )


def find_action(kind: str, row: Row | None, *, is_own: bool) -> Action | str:
    """Return the action on the selected run, or why there is none."""
    if row is None:
        return "Select a run first."
    if row.run is None:
        command = f"`{plain(to_type(f'sweep cancel {quote(row.name)}'))}` cancels all of them"
        return f"Press space and select one of the {row.count} trials. {command}."
    run = row.run
    if not is_own:
        return f"Run {plain(run.key)} belongs to another user; you can only view it."
    if kind == REQUEUE:
        return _requeue(run)
    if run.is_over:
        return f"Run {plain(run.key)} has already ended: {plain(run.status)}."
    name = _name(run)
    if kind == STOP or not run.job:
        if run.job and run.status != "running":
            return f"Run {plain(run.key)} is not running yet, so it has nothing to save. To cancel it, press c."
        text = f"It saves a checkpoint first. To continue it later: {_again(run)}"
        return Action(kind, run, f"Let {name} save and stop?", text, "Save and stop")
    text = "Steps since its last checkpoint are lost, and it is not requeued. To save first, press s instead."
    return Action(kind, run, f"Cancel {name} now?", text, "Cancel the run")


def _requeue(run: Overview) -> Action | str:
    if not run.job:
        return f"Run {plain(run.key)} is not a Slurm job. Continue it with `{_again(run)}`."
    if run.sweep and run.is_over:
        return (
            f"It is a trial: `{_again(run)}` runs it again, and others that ended in the same way."
        )
    name = _name(run)
    if run.is_over:
        text = (
            "It continues from its newest checkpoint, as a new job with the same code and settings."
        )
        return Action(REQUEUE, run, f"Submit {name} again?", text, "Submit again")
    if run.status != "running":
        return f"Run {plain(run.key)} is already in the queue as job {plain(run.job)}."
    text = "It saves a checkpoint, is requeued, and continues when the job starts again."
    return Action(REQUEUE, run, f"Requeue {name}?", text, "Requeue")


def _again(run: Overview) -> str:
    return plain(resume_command(RunFolder(Path(run.path)), job=run.job or None))


def _name(run: Overview) -> str:
    name = run.name or run.program.rpartition("/")[2]
    where = f"job {plain(run.job)}" if run.job else "a local run"
    return (
        f"run {plain(run.key)} ({plain(name)}, {where})"
        if name
        else f"run {plain(run.key)} ({where})"
    )
