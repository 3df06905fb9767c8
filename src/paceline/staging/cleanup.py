"""Folders on a node's own disk: private, marked with their owner, and removed however the run ends.

<base>/paceline-<uid>/            mode 0700
  run-<run>-<job start>-<node>/   owner.json, data/ (PACELINE_DATA)
  cache/<key>/                    data that `keep` leaves for later jobs

A run removes its own folder. What a killed run has left goes once the scheduler or the process
table shows that it is over. Results are collected first.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.files import find_own_folder, make_own_folder
from paceline.contract.foreign_records import make, read_object
from paceline.contract.launcher_variables import slurm_query_environment
from paceline.contract.process import pid_namespace, process_start
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem
from paceline.staging.cache import CachedItem, cached_items
from paceline.staging.collect import CollectResult, collect
from paceline.staging.copy import remove_tree

SQUEUE_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True)
class Owner:
    """What made a folder: a Slurm job, or a process on this machine."""

    run: str
    job_start: str
    node: int
    host: str
    job: str = ""
    cluster: str = ""
    pid: int = 0
    started: str = ""
    namespace: str = ""
    staged: list[str] = field(default_factory=list)
    collect: list[str] = field(default_factory=list)
    destination: str = ""
    collected: bool = False


def this_process() -> dict[str, Any]:
    """Identify this process for good: process ids are reused, and other namespaces have their
    own.
    """
    pid = os.getpid()
    return {"pid": pid, "started": process_start(pid), "namespace": pid_namespace()}


def make_private_folder(base: Path) -> Path:
    """Return the user's own folder below a base, and make it if necessary."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        return make_own_folder(base)
    except OSError as error:
        raise EnvironmentProblem(
            f"Cannot create a folder for data in {base}: {error.strerror}.",
            hint="Set folder in [data] to a writable folder on the nodes' own disks.",
        ) from None


def make_run_folder(path: Path, owner: Owner) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    write_owner(path, owner)
    (path / "data").mkdir(mode=0o700, exist_ok=True)


def write_owner(path: Path, owner: Owner) -> None:
    write_atomically(path / "owner.json", json.dumps(asdict(owner)), mode=0o600)


def read_owner(path: Path) -> Owner | None:
    try:
        return make(Owner, read_object(path / "owner.json"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Leftover:
    """A run's folder that may be removed, and why."""

    path: Path
    reason: str
    owner: Owner

    def remove(self) -> bool:
        owner = self.owner
        is_due = owner.collect and not owner.collected
        has_run = Path(owner.destination).parent.is_dir()
        if is_due and has_run and collect_results(self.path, owner, keep_newer=True).problems:
            return False  # the next job here tries again
        return remove_tree(self.path)


def collect_results(path: Path, owner: Owner, *, keep_newer: bool = False) -> CollectResult:
    """Copy the results of a run back from its folder on the node."""
    return collect(
        path / "data",
        Path(owner.destination),
        patterns=owner.collect,
        staged=owner.staged,
        keep_newer=keep_newer,
    )


def find_leftovers(
    base: Path, environ: Mapping[str, str], *, job_start: str = "", all_cached: bool = False
) -> list[Leftover | CachedItem]:
    """Return what is left in our folder below a base. Earlier starts of the caller's own job
    (`job_start`) are over.
    """
    private = find_own_folder(base)
    if private is None:
        return []  # another user's markers must not decide what is copied where
    # before asking the scheduler: a new job may start meanwhile
    owners = {path: read_owner(path) for path in sorted(private.glob("run-*"))}
    jobs = {owner.job for owner in owners.values() if owner is not None}
    active = active_jobs(environ) if jobs - {"", environ.get("SLURM_JOB_ID", "")} else None
    leftovers: list[Leftover | CachedItem] = []
    for path, owner in owners.items():
        if owner is not None and (reason := _reason_to_remove(owner, active, environ, job_start)):
            leftovers.append(Leftover(path, reason, owner))
    cached, now = cached_items(private), time.time()
    return leftovers + [item for item in cached if all_cached or item.is_expired(now)]


def remove_leftovers(base: Path, environ: Mapping[str, str], *, job_start: str) -> list[Path]:
    """Remove everything that is certainly left behind. Returns what was removed."""
    leftovers = find_leftovers(base, environ, job_start=job_start)
    return [leftover.path for leftover in leftovers if leftover.remove()]


def _reason_to_remove(
    owner: Owner, active: set[str] | None, environ: Mapping[str, str], job_start: str
) -> str:
    """Return why a folder's run is over; empty if it is not, or if that is unknown."""
    # a base may be on a disk that several nodes share
    if owner.host != (environ.get("SLURMD_NODENAME") or socket.gethostname()):
        return ""
    if not owner.job:
        is_unknown = owner.namespace != pid_namespace()
        is_alive = is_unknown or process_start(owner.pid) == owner.started
        return "" if is_alive else f"process {owner.pid} has ended"
    if owner.job == environ.get("SLURM_JOB_ID"):
        is_earlier = job_start and owner.job_start != job_start
        return f"an earlier start of job {owner.job}" if is_earlier else ""
    cluster = environ.get("SLURM_CLUSTER_NAME") or owner.cluster
    if active is None or owner.job in active or (owner.cluster and owner.cluster != cluster):
        return ""
    return f"job {owner.job} is over"


def active_jobs(environ: Mapping[str, str]) -> set[str] | None:
    """Return the ids of this user's jobs that are on nodes now; None if the scheduler does not
    answer.
    """
    command = ["squeue", "--noheader", "--all", f"--user={os.geteuid()}", "--format=%A %T"]
    try:
        done = subprocess.run(
            command,
            env=slurm_query_environment(environ),
            text=True,
            capture_output=True,
            timeout=SQUEUE_TIMEOUT,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split() for line in done.stdout.splitlines()]
    # A pending job is on no node: its folders belong to an earlier start.
    return {row[0] for row in rows if row and row[-1] != "PENDING"}
