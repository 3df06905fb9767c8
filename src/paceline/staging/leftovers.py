"""Find and remove what runs have left on this node: each run folder has a marker that names its job
or process.

A folder goes only if the scheduler or the process table shows that its run is over. Results are
collected first.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files.shared_folders import find_own_folder
from paceline.contract.launcher_variables import slurm_query_environment
from paceline.contract.processes.process import pid_namespace, process_start
from paceline.staging.cache import CachedItem, cached_items
from paceline.staging.collect import Collection
from paceline.staging.copy.transfer import Transfer
from paceline.staging.folders import Owner, read_owner, remove_tree

SQUEUE_TIMEOUT = 20.0  # seconds
UNMARKED_AGE = 86400.0  # seconds after which a folder without a marker counts as left behind


@dataclass(frozen=True)
class Leftover:
    """Something that may be removed, and why."""

    path: Path
    reason: str
    owner: Owner | None = None
    cached: CachedItem | None = None

    def remove(self) -> bool:
        if self.cached is not None:
            return self.cached.remove()
        collect_results(self.path, self.owner)
        return remove_tree(self.path)


def find_leftovers(
    base: Path, environ: Mapping[str, str], *, job_start: str = "", all_cached: bool = False
) -> list[Leftover]:
    """Return what is left in our folder below a base. Earlier starts of the caller's own job
    (`job_start`) are over.
    """
    private = find_own_folder(base)
    if private is None:
        return []  # another user's markers must not decide what is copied where
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    folders = sorted(private.glob("run-*"))
    # before asking the scheduler: a new job may start meanwhile
    owners = {path: read_owner(path) for path in folders}
    others = {owner.job for owner in owners.values() if owner is not None} - {
        "",
        environ.get("SLURM_JOB_ID", ""),
    }
    active = active_jobs(environ) if others else None
    leftovers = []
    for path, owner in owners.items():
        reason = reason_to_remove(
            path, owner, host=host, active=active, environ=environ, job_start=job_start
        )
        if reason:
            leftovers.append(Leftover(path, reason, owner))
    now = time.time()
    for item in cached_items(private):
        if all_cached or item.is_expired(now):
            leftovers.append(
                Leftover(item.folder, f"cached copy of {item.read_record()[1]}", cached=item)
            )
    return leftovers


def reason_to_remove(
    path: Path,
    owner: Owner | None,
    *,
    host: str,
    active: set[str] | None,
    environ: Mapping[str, str],
    job_start: str,
) -> str:
    """Return why a folder's run is over; empty if it is not, or if that is unknown."""
    if owner is None:
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            return ""
        return "it has no owner" if age > UNMARKED_AGE else ""
    if owner.host != host:
        return ""
    if owner.job:
        if owner.job == environ.get("SLURM_JOB_ID") and job_start and owner.job_start != job_start:
            return f"an earlier start of job {owner.job}"
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        if active is None or (owner.cluster and cluster and owner.cluster != cluster):
            return ""
        return "" if owner.job in active else f"job {owner.job} is over"
    if owner.namespace != pid_namespace():
        return ""
    return "" if process_start(owner.pid) == owner.started else f"process {owner.pid} has ended"


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
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    rows = [line.split() for line in done.stdout.splitlines()]
    # A pending job is on no node: its folders belong to an earlier start.
    return {row[0] for row in rows if row and row[-1] != "PENDING"}


def collect_results(path: Path, owner: Owner | None) -> None:
    """Copy back the results of a run whose agent could not do it."""
    if owner is None or owner.collected or not owner.collect:
        return
    if os.path.isdir(Path(owner.destination).parent):
        destination = Path(owner.destination)
        collection = Collection(
            path / "data",
            destination,
            patterns=owner.collect,
            staged=owner.staged,
            claim=owner.claim,
        )
        collection.run(Transfer())


def remove_leftovers(base: Path, environ: Mapping[str, str], *, job_start: str) -> list[Path]:
    """Remove everything that is certainly left behind. Returns what was removed."""
    leftovers = find_leftovers(base, environ, job_start=job_start)
    return [leftover.path for leftover in leftovers if leftover.remove()]
