"""Whether a run may start here: nobody else may have its folder."""

from __future__ import annotations

import os

from paceline.contract.claims import (
    ELSEWHERE,
    HERE,
    Holder,
    claim,
    find_holder,
    local_job_start_name,
    record_processes,
)
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, read_verdict
from paceline.errors import ClusterError, UsageError
from paceline.spec.shell_text import to_type


def claim_run(run: RunFolder) -> None:
    """Claim a run folder for this process; raise an error if the run is queued or running
    somewhere.
    """
    record_processes(run, [os.getpid()])
    claim(run, local_job_start_name(), lambda holder: _require_over(run, holder))


def require_not_running(run: RunFolder) -> None:
    """Raise an error if the run is queued or running, as a job or on some machine."""
    _require_over(run, find_holder(run))


def _require_over(run: RunFolder, holder: Holder | None) -> None:
    if run.job.exists() or (holder is not None and holder.job is not None):
        _require_no_job(run, holder)
    if holder is None or holder.job is not None or holder.name == local_job_start_name():
        return
    where, name = holder.whereabouts(), run.path.name
    if where == HERE:
        raise UsageError(
            f"Run {name} is still running as process {holder.pids()[0]}.",
            hint=f"Wait for it, or stop it with `{to_type(f'cancel {name}')}`.",
        )
    if where == ELSEWHERE:
        raise UsageError(
            f"Run {name} was started on {holder.host}, and has not ended there as far as this host "
            "can see.",
            hint="Wait for it, or stop it there. Only if you are sure that it no longer runs, "
            f"remove {holder.job_start.process} and try again.",
        )


def _require_no_job(run: RunFolder, holder: Holder | None) -> None:
    # a new run has no job, and its command should start fast
    from paceline.slurm import commands as slurm
    from paceline.slurm import squeue_and_sacct
    from paceline.slurm.job_states import LIVE, WAITING

    jobs = [job for job in (slurm.read_job_id(run), holder.job if holder else None) if job]
    try:
        states = squeue_and_sacct.states(jobs)
    except ClusterError as problem:
        if holder is not None and read_verdict(holder.job_start.verdict) in (DONE, FAILED):
            return
        raise ClusterError(
            f"Cannot find out whether job {jobs[0]} still has run {run.path.name}: "
            f"{problem.message}",
            hint="Try again where that Slurm is reachable: on a login node, or, if the job is in "
            'a sandbox, after `eval "$(paceline sandbox env)"` in this terminal. Without that '
            "Slurm, start a new run from its newest checkpoint: "
            f"`--start-from {run.path.name} --continue`.",
        ) from None
    for state in states.values():
        if state.phase in (LIVE, WAITING):
            raise UsageError(
                f"Run {run.path.name} is {state.label} as job {state.id}.",
                hint=f"Wait for it, or end it with `{to_type(f'cancel {run.path.name}')}`.",
            )
