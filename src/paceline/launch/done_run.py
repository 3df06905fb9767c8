"""A run that is done, and that somebody submits again: is there anything left for a job to do?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.claims import find_holder
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.quote import quote
from paceline.contract.run_folder import RunFolder
from paceline.contract.typed_command import to_type
from paceline.contract.verdict import DONE, read_verdict
from paceline.errors import UsageError
from paceline.slurm.commands import read_job_id
from paceline.spec import Flag, Program

# Tables whose settings reach the script, so that it may find more to do. Those of the others change
# where it runs.
_SEEN_BY_SCRIPT = ("params", "environment", "runtime", "data", "project")


def require_work_left(
    folder: RunFolder,
    spec: LaunchSpec,
    *,
    program: Program | None,
    flags: Iterable[Flag],
    params: Iterable[str],
) -> str:
    """Return a note if the run is done and its script has to find out whether something is left;
    empty otherwise.

    Raises UsageError if it is done, and nothing that was typed asks for more. `program` is the
    script that was typed.
    """
    if not is_done(folder):
        return ""
    run = folder.path.name
    if not find_checkpoints(folder.path):
        return f"{run} is done and has no checkpoint: its script starts from the beginning"
    changes = [
        flag
        for flag in flags
        if flag.value is not None and flag.key.partition(".")[0] in _SEEN_BY_SCRIPT
    ]
    if program is None and not changes and not list(params):
        name = spec.program if spec.is_module else Path(spec.program).name
        script = f"{'-m ' if spec.is_module else ''}{quote(name)}"
        raise UsageError(
            f"Run {run} is done, so there is nothing left to do.",
            hint="To train longer, pass the script with new arguments: "
            f"{to_type(f'submit --resume {run}')} {script}"
            f" --epochs 20\n  For a new run: {to_type('submit --name NEW')} {script}",
        )
    if (
        program is not None
        and list(program.args) == list(spec.args)
        and not changes
        and not list(params)
    ):
        return (
            f"{run} is done: with the same arguments, the job has nothing to do unless the "
            "code now trains for longer"
        )
    return ""


def is_done(folder: RunFolder) -> bool:
    """Return whether a run that is over is done, its last state is saved, and no later job was
    submitted.
    """
    holder = find_holder(folder)
    # a job that has not started may have had more to do
    if holder is None or holder.job != read_job_id(folder):
        return False
    return read_verdict(holder.job_start.verdict) == DONE and not holder.job_start.unsaved.exists()
