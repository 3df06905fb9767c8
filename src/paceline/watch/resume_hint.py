"""What to type to go on with a run."""

from __future__ import annotations

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.run_folder import RunFolder
from paceline.plan.quote import quote


def submit_again(folder: RunFolder) -> str:
    """Return the command that goes on with a run of Slurm in the queue."""
    path = folder.path
    if path.parent.name == "trials":
        return f"paceline sweep --resubmit failed {quote(path.parent.parent.name)}"
    return f"paceline submit --resume {path.name}"


def resume_command(folder: RunFolder, *, job: str | None) -> str:
    """Return the command that goes on with a run where it ran: in the queue if it was a job, or else here."""
    return submit_again(folder) if job is not None else f"paceline run --resume {folder.path.name}"


def describe_start(folder: RunFolder) -> str:
    """Return where a resume of the run begins."""
    if found := find_checkpoints(folder.path):
        return f"from step {checkpoint_step(found[0].name)}"
    from paceline.watch.goodput import read_events

    events = read_events(folder.events)
    saves_itself = any(event["event"] == "ranks" and not event.get("uses_runtime", True) for event in events)
    if saves_itself and not any(event["event"] == "training" for event in events):
        return "from the script's own checkpoint, if any"
    return "no checkpoint: the script starts again"
