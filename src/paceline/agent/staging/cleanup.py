"""Leftover of runs that are over: found by their markers, judged by the scheduler or by the process table.

When nobody can say, a folder stays. What a run had to bring back is brought back before its folder goes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.staging.cache import CachedItem, cached_items
from paceline.agent.staging.collect import Collection
from paceline.agent.staging.copy.transfer import Transfer
from paceline.agent.staging.folders import Owner, is_own_folder, namespace, read_owner, remove_tree, start_of

PATIENCE = 20.0  # seconds for the scheduler's answer
UNMARKED = 86400.0  # seconds after which a folder without a marker counts as left behind


@dataclass(frozen=True)
class Leftover:
    """Something that may go, and why."""

    path: Path
    why: str
    owner: Owner | None = None
    kept: CachedItem | None = None

    def remove(self) -> bool:
        if self.kept is not None:
            return self.kept.remove()
        rescue(self.path, self.owner)
        return remove_tree(self.path)


def find_leftovers(
    private: Path, environ: Mapping[str, str], *, job_start: str = "", every_kept: bool = False
) -> list[Leftover]:
    """What is left below a private folder. `job start` is the caller's own: earlier ones of its job are over."""
    if not is_own_folder(private):
        return []  # what somebody else has put there must not say what is brought back, and where to
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    folders = sorted(private.glob("run-*"))
    owners = {path: read_owner(path) for path in folders}  # read before the scheduler is asked, never after
    jobs = {owner.job for owner in owners.values() if owner is not None and owner.job}
    live = live_jobs(environ) if jobs else None
    found = []
    for path, owner in owners.items():
        why = judge(path, owner, host=host, live=live, environ=environ, job_start=job_start)
        if why:
            found.append(Leftover(path, why, owner))
    now = time.time()
    for item in cached_items(private):
        if every_kept or item.is_expired(now):
            found.append(Leftover(item.folder, f"kept copy of {item.about()[1]}", kept=item))
    return found


def judge(
    path: Path,
    owner: Owner | None,
    *,
    host: str,
    live: set[str] | None,
    environ: Mapping[str, str],
    job_start: str,
) -> str:
    """Why a folder's run is over; empty when it is not, or when nobody can say."""
    if owner is None:
        try:
            age = time.time() - path.stat().st_mtime
        except OSError:
            return ""
        return "nobody's" if age > UNMARKED else ""
    if owner.host != host:
        return ""
    if owner.job:
        if owner.job == environ.get("SLURM_JOB_ID") and job_start and owner.job_start != job_start:
            return f"an earlier start of job {owner.job}"
        here = environ.get("SLURM_CLUSTER_NAME", "")
        if live is None or (owner.cluster and here and owner.cluster != here):
            return ""
        return "" if owner.job in live else f"job {owner.job} is over"
    if owner.namespace != namespace():
        return ""
    return "" if start_of(owner.pid) == owner.started else f"process {owner.pid} has ended"


def live_jobs(environ: Mapping[str, str]) -> set[str] | None:
    """Ids of this user's jobs that are on nodes now; None when the scheduler gives no answer."""
    command = ["squeue", "--noheader", "--all", f"--user={os.geteuid()}", "--format=%A %T"]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            text=True,
            capture_output=True,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    rows = [line.split() for line in done.stdout.splitlines()]
    # One that waits is on no node: what it left was an earlier start's.
    return {row[0] for row in rows if row and row[-1] != "PENDING"}


def rescue(path: Path, owner: Owner | None) -> None:
    """Bring back the results of a run whose agent could not."""
    if (
        owner is None
        or owner.collected
        or not owner.collect
        or not os.path.isdir(Path(owner.destination).parent)
    ):
        return
    Collection(path / "data", Path(owner.destination), patterns=owner.collect, staged=owner.staged).carry_out(
        Transfer()
    )


def remove_leftovers(private: Path, environ: Mapping[str, str], *, job_start: str) -> list[Path]:
    """Remove what is certain to be left behind; what was removed."""
    return remove(find_leftovers(private, environ, job_start=job_start))


def remove(found: Iterable[Leftover]) -> list[Path]:
    return [each.path for each in found if each.remove()]
