"""Claims on a run folder: one job start at a time has it, on whatever host.

`claims/1`, `claims/2`, ... are links that name job starts; the last one has the run folder now.
Making a link is atomic: if several find that the last one is over, exactly one of them succeeds it.
Links stay, so that nobody mistakes a new claim for an old one. `stop_and_requeue.sh` does the same
for jobs.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_object
from paceline.contract.files.grant_file import explain_refusal, needs_grant, read_winner
from paceline.contract.processes.process import pid_namespace, process_start
from paceline.contract.quote import quote
from paceline.contract.run_folder import JobStartFolder, RunFolder, write_atomically
from paceline.contract.typed_command import to_type
from paceline.contract.verdict import DONE, FAILED, read_verdict
from paceline.errors import ClusterError, UsageError

_NAME = re.compile(r"[\w-]+")  # of a job start
HERE, ELSEWHERE, OVER = "here", "elsewhere", "over"  # where the processes of a local job start are


@functools.cache
def _token(pid: int) -> str:
    return secrets.token_hex(3)


def local_job_start_name() -> str:
    """Return the name of this process's start of a run. Pids are reused, and other hosts have the
    same ones.
    """
    return f"pid-{os.getpid()}-{_token(os.getpid())}"


@dataclass(frozen=True)
class Holder:
    """The job start that has a run folder, or had it last."""

    run: RunFolder
    name: str  # of the job start
    number: int  # of the claim

    @property
    def path(self) -> str:
        """The folder of the job start. A list of runs has thousands of them, and needs no more."""
        return f"{self.run.path}/job-starts/{self.name}"

    @property
    def job_start(self) -> JobStartFolder:
        return self.run.job_start(self.name)

    @property
    def job(self) -> str | None:
        """The Slurm job; None for a local run."""
        match = re.fullmatch(r"(\d+(?:_\d+)?)-\d+(?:_\d+)?", self.name)
        return match[1] if match else None

    @property
    def host(self) -> str:
        return str(self._process().get("host", "?"))

    def pids(self) -> list[int]:
        """Return its processes that run on this host: the command, and its agents."""
        return live_pids(self._process())

    def whereabouts(self) -> str:
        """Return where the processes of a local job start are: here, on another host (perhaps), or
        nowhere.
        """
        known = self._process()
        if not known or self.job_start.verdict.exists():
            return OVER
        if self.pids():
            return HERE
        rebooted = known.get("host") == socket.gethostname() and known.get("boot") != _boot()
        return OVER if rebooted or _is_this_host(known) else ELSEWHERE

    def _process(self) -> dict[str, Any]:
        try:
            return read_object(self.job_start.process)
        except (OSError, ValueError):
            return {}


def find_holder(run: RunFolder) -> Holder | None:
    """Return who has the run folder, or had it last."""
    number, name, claims = 0, "", f"{run.path}/claims"
    while True:
        try:
            name = os.readlink(f"{claims}/{number + 1}")
        except OSError:
            if not os.path.lexists(f"{claims}/{number + 1}"):
                break
            name = ""  # not a link: nobody's claim
        number += 1
    return Holder(run, name, number) if _NAME.fullmatch(name) else None


def claim_run(run: RunFolder) -> None:
    """Claim a run folder for this process; raise an error if the run is queued or running
    somewhere.
    """
    name = local_job_start_name()
    record_processes(run, [os.getpid()])
    run.claims.mkdir(parents=True, exist_ok=True)
    while True:
        holder = find_holder(run)
        _require_over(run, holder)  # the one whose successor this is: by now there may be another
        try:
            os.symlink(name, run.claims / str(holder.number + 1 if holder else 1))
            return
        except FileExistsError:  # somebody was faster: look again
            if find_holder(run) is None:
                raise UsageError(
                    f"{run.claims} has an entry that is not a claim.",
                    hint="Remove it, if nothing runs there.",
                ) from None


def record_processes(run: RunFolder, pids: Sequence[int]) -> None:
    """Write down the processes of this job start, for whoever wants to know whether they still
    run.
    """
    job_start = run.job_start(local_job_start_name())
    job_start.path.mkdir(parents=True, exist_ok=True)
    write_atomically(job_start.process, describe_processes(pids) + "\n")


def describe_processes(pids: Sequence[int]) -> str:
    """Return processes of this host so that `live_pids` can tell on any host which of them still
    run.
    """
    processes = [[pid, _started(pid)] for pid in pids]
    return json.dumps(
        {
            "host": socket.gethostname(),
            "boot": _boot(),
            "namespace": pid_namespace(),
            "processes": processes,
        }
    )


def live_pids(known: dict[str, Any]) -> list[int]:
    """Return which of these processes run on this host. A pid that another process has now does
    not count.
    """
    if not _is_this_host(known):
        return []
    return [
        int(pid)
        for pid, started in known.get("processes", ())
        if started and _started(pid) == started
    ]


def require_not_running(run: RunFolder) -> None:
    """Raise an error if the run is queued or running, as a job or on some machine."""
    _require_over(run, find_holder(run))


def require_permission(run: RunFolder) -> None:
    """Raise an error for a run that was submitted to several clusters and is not the one that
    trains.
    """
    if not needs_grant(run):
        return
    why, winner = explain_refusal(run) or "it never got permission to start", read_winner(run)
    raise UsageError(
        f"Run {run.path.name} was submitted with --first and will never train: {why}.",
        hint=f"See `paceline ps --on {quote(winner)}`, or start a new run."
        if winner
        else "Start a new run.",
    )


def _require_over(run: RunFolder, holder: Holder | None) -> None:
    _require_no_job(run, holder)
    if holder is None or holder.job is not None or holder.name == local_job_start_name():
        return
    where = holder.whereabouts()
    if where == HERE:
        pid = holder.pids()[0]
        raise UsageError(
            f"Run {run.path.name} is still running as process {pid}.",
            hint=f"Wait for it, or stop it with `{to_type(f'cancel {run.path.name}')}`.",
        )
    if where == ELSEWHERE:
        raise UsageError(
            f"Run {run.path.name} was started on {holder.host}, and has not ended there as far as "
            "this host can see.",
            hint="Wait for it, or stop it there. Only if you are sure that it no longer runs, "
            "remove"
            f" {holder.job_start.process} and try again.",
        )


def _require_no_job(run: RunFolder, holder: Holder | None) -> None:
    if not run.job.exists() and (holder is None or holder.job is None):
        return
    # a new run has no job, and its command should start fast
    from paceline.slurm import commands as slurm
    from paceline.slurm.job_states import squeue_and_sacct
    from paceline.slurm.job_states.meanings import LIVE, WAITING

    jobs = [
        job for job in (slurm.read_job_id(run), holder.job if holder else None) if job is not None
    ]
    try:
        states = squeue_and_sacct.states(jobs)
    except ClusterError as problem:
        if holder is not None and read_verdict(holder.job_start.verdict) in (DONE, FAILED):
            return
        raise ClusterError(
            f"Cannot find out whether job {jobs[0]} still has run {run.path.name}: "
            f"{problem.message}",
            hint="Try again where that Slurm is reachable: on a login node, or, if the job is in "
            "a sandbox, after"
            ' `eval "$(paceline sandbox env)"` in this terminal. Without that Slurm, start a new '
            "run from its newest"
            f" checkpoint: `--start-from {run.path.name} --continue`.",
        ) from None
    for state in states.values():
        if state.phase in (LIVE, WAITING):
            raise UsageError(
                f"Run {run.path.name} is {state.label} as job {state.id}.",
                hint=f"Wait for it, or end it with `{to_type(f'cancel {run.path.name}')}`.",
            )


def _is_this_host(known: dict[str, Any]) -> bool:
    """Return whether a recorded process would be visible to this one: containers hide theirs from
    each other.
    """
    if known.get("namespace") != pid_namespace():
        return False
    return bool(
        known.get("boot") == _boot() if _boot() else known.get("host") == socket.gethostname()
    )


def _started(pid: int) -> str:
    """Return when a process started, which tells it from others with the same pid; empty if it
    does not run.
    """
    if Path("/proc/self/stat").exists():
        return process_start(pid)
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
