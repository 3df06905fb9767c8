"""Who has a run folder: one job start at a time, on whatever host. Everybody asks here.

`claims/1`, `claims/2`, ... are links that name job starts; the last one has the run folder now.
Making a link is atomic: if several find that the last one is over, exactly one of them succeeds it.
Links stay, so that nobody mistakes a new claim for an old one. The command claims the folder of a
local run, and `stop_and_requeue.sh` does the same for a job, where there may be no Python. Agents
and ranks ask for a `successor`: while they run, and before each checkpoint is committed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.contract.foreign_records import read_fields
from paceline.contract.process import boot_id, pid_namespace, process_start
from paceline.contract.run_folder import JobStartFolder, RunFolder, write_atomically
from paceline.errors import UsageError

HERE, ELSEWHERE, OVER = "here", "elsewhere", "over"  # where the processes of a local job start are
_NAME = re.compile(r"[\w-]+")  # of a job start


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
        if live_pids(known):
            return HERE
        rebooted = known.get("host") == socket.gethostname() and known.get("boot") != boot_id()
        return OVER if rebooted or _is_this_host(known) else ELSEWHERE

    def _process(self) -> dict[str, Any]:
        return read_fields(self.job_start.process)


def _claims(run: RunFolder) -> list[str]:
    """Return the job starts that have claimed the run, oldest first; none if they can't be read.

    Lists the folder: a network file system may remember for a minute that a single link was not
    there.
    """
    try:
        numbers = sorted(int(name) for name in os.listdir(f"{run.path}/claims") if name.isdigit())
        return [os.readlink(f"{run.path}/claims/{number}") for number in numbers]
    except OSError:
        return []


def find_holder(run: RunFolder) -> Holder | None:
    """Return who has the run folder, or had it last."""
    names = _claims(run)
    found = names and _NAME.fullmatch(names[-1])
    return Holder(run, names[-1], len(names)) if found else None


def claim(run: RunFolder, name: str, require_over: Callable[[Holder | None], None]) -> None:
    """Give a run folder to a job start.

    `require_over` raises an error if the holder is not over; it is asked again for each holder that
    was faster.
    """
    run.claims.mkdir(parents=True, exist_ok=True)
    while True:
        holder = find_holder(run)
        require_over(holder)
        try:
            os.symlink(name, run.claims / str(holder.number + 1 if holder else 1))
            return
        except FileExistsError:
            if find_holder(run) is None:
                raise UsageError(
                    f"{run.claims} has an entry that is not a claim.",
                    hint="Remove it, if nothing runs there.",
                ) from None


def find_successor(run: RunFolder, job_start: str) -> str:
    """Return the name of the job start that has taken the run folder over from this one; "" if
    none has, or if the claims can't be read now. A job start without a claim was started by hand.
    """
    names = _claims(run)
    return names[-1] if job_start in names[:-1] and names[-1] != job_start else ""


# -- the processes of a local job start


@functools.cache
def _token(pid: int) -> str:
    return secrets.token_hex(3)


def local_job_start_name() -> str:
    """Return the name of this process's start of a run. Pids are reused, and other hosts have the
    same ones.
    """
    return f"pid-{os.getpid()}-{_token(os.getpid())}"


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
    known = {"host": socket.gethostname(), "boot": boot_id(), "namespace": pid_namespace()}
    return json.dumps({**known, "processes": [[pid, process_start(pid)] for pid in pids]})


def live_pids(known: dict[str, Any]) -> list[int]:
    """Return which of these processes run on this host. A pid that another process has now does
    not count.
    """
    if not _is_this_host(known):
        return []
    return [
        int(pid)
        for pid, started in known.get("processes", ())
        if started and process_start(pid) == started
    ]


def _is_this_host(known: dict[str, Any]) -> bool:
    """Return whether a recorded process would be visible to this one: containers hide theirs from
    each other.
    """
    if known.get("namespace") != pid_namespace():
        return False
    boot = boot_id()
    return bool(known.get("boot") == boot if boot else known.get("host") == socket.gethostname())
