"""What to type to continue a run."""

from __future__ import annotations

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.files.grant_file import needs_grant
from paceline.contract.quote import quote
from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.contract.sweep.folder import TrialFolder
from paceline.contract.typed_command import cluster, to_type
from paceline.watch.failure_text import is_usage_error, read_failure


def submit_again(folder: RunFolder) -> str:
    """Return the command that goes on with a run of Slurm in the queue."""
    return _trial_again(folder) or to_type(f"submit --resume {folder.path.name}")


def resume_command(folder: RunFolder, *, job: str | None) -> str:
    """Return the command that goes on with a run where it ran: in the queue if it was a job, or
    else here.

    Empty for a run that another cluster trains, and for one that ran on a login node if the user is
    not there.
    """
    if needs_grant(folder):
        return ""
    if job is not None:
        return submit_again(folder)
    if cluster():
        return ""
    return _trial_again(folder, "--local ") or f"paceline run --resume {folder.path.name}"


def _trial_again(folder: RunFolder, where: str = "") -> str:
    """Return the command that runs a trial again, and others that ended as it did; empty for other
    runs.
    """
    if folder.path.parent.name != TRIALS:
        return ""
    trial = TrialFolder(folder.path)
    state = "failed" if trial.result.exists() else "missing"
    again = f"sweep {where}--resubmit {state} {quote(trial.sweep.name)}"
    return f"paceline {again}" if where else to_type(again)


def describe_start(folder: RunFolder) -> str:
    """Return where a resume of the run begins."""
    if found := find_checkpoints(folder.path):
        return f"from step {checkpoint_step(found[0].name)}"
    from paceline.watch.goodput import read_events

    events = read_events(folder.events)
    has_trained = any(event["event"] == "training" for event in events)
    starts = [event for event in events if event["event"] in ("launch", "ranks")]
    if not (starts or has_trained or folder.attempts()):
        return "its ranks had not started"
    saves_itself = any(
        event["event"] == "ranks" and not event.get("uses_runtime", True) for event in starts
    )
    if saves_itself and not has_trained:
        return "from the script's own checkpoint, if any"
    if (attempts := folder.attempts()) and is_usage_error(read_failure(attempts[-1])):
        return "add the script and other arguments: it rejected these"
    return "no checkpoint: the script starts from the beginning"
