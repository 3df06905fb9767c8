"""Folders on a node's own disk: private, marked with their owner, and removed however the run ends.

<base>/paceline-<uid>/            mode 0700
  run-<run>-<job start>-<node>/   owner.json, data/ (PACELINE_DATA)
  cache/<key>/                    data that `keep` leaves for later jobs

A run removes its own folder. What a killed run has left goes once the scheduler or the process
table shows that it is over. Results are collected first.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.contract.files import find_own_folder, make_own_folder, replace_file, show_size
from paceline.contract.foreign_records import make, read_object
from paceline.contract.launcher_variables import slurm_query_environment
from paceline.contract.process import pid_namespace, process_start
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem, PacelineError
from paceline.staging.cache import CachedItem, cached_items
from paceline.staging.copy import Transfer, copy_file, remove_tree

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
    """Make the folder of a job start on a node, anew if an agent that was killed has left it."""
    if (killed := read_owner(path)) is not None:
        Leftover(path, "its agent was killed", killed).remove()
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


@dataclass
class CollectResult:
    """What was collected."""

    sizes: list[int] = field(default_factory=list)  # of the files that were copied
    outdated: list[str] = field(default_factory=list)  # left: the destination has newer ones
    problems: list[str] = field(default_factory=list)

    def describe(self, host: str, destination: str) -> list[str]:
        """Return lines for the user."""
        lines = [
            f"warning: cannot collect a result on {host}: {problem}"
            for problem in self.problems[:5]
        ]
        if self.outdated:
            lines.append(
                f"left {len(self.outdated)} results on {host}: the run folder has newer ones"
            )
        if self.sizes:
            size = show_size(sum(self.sizes))
            lines.append(f"collected {len(self.sizes)} files ({size}) from {host}: {destination}")
        return lines


def collect(
    data: Path,
    destination: Path,
    *,
    patterns: Sequence[str],
    staged: Sequence[str],
    keep_newer: bool = False,
) -> CollectResult:
    """Copy what matches some patterns below `data` to the same relative paths below `destination`.

    With `keep_newer`, files stay there that are newer, by their times: what a killed run has left
    on a node is collected late. Without, nothing is compared, as hosts' clocks may differ.
    """
    sizes = []
    for name in _find_names(data, patterns, staged):
        with suppress(OSError):
            sizes.append((os.lstat(data / name).st_size, name))
    result, transfer = CollectResult(), Transfer()

    def copy(name: str) -> None:
        source, target = data / name, destination / name
        try:
            status = source.lstat()
            if os.path.lexists(target):
                existing = target.lstat()
                if (existing.st_mtime_ns, existing.st_size) == (status.st_mtime_ns, status.st_size):
                    return
                if keep_newer and existing.st_mtime_ns > status.st_mtime_ns:
                    result.outdated.append(name)
                    return
            if _replace(source, target, transfer):
                result.sizes.append(status.st_size)
        except OSError as error:
            result.problems.append(f"{name!r}: {error.strerror}")
        except PacelineError as error:  # it changed meanwhile
            result.problems.append(f"{name!r}: {error.message}")

    transfer.run([partial(copy, name) for _, name in sorted(sizes)])
    return result


def _find_names(data: Path, patterns: Sequence[str], staged: Sequence[str]) -> list[str]:
    """Return the files and links that match, without staged data: it does not come back."""

    def is_staged(name: str) -> bool:
        return any(name == each or name.startswith(f"{each}/") for each in staged)

    def files(name: str) -> Iterator[str]:
        path = data / name
        if path.is_symlink() or not path.is_dir():
            yield name
            return
        for folder, folders, found in os.walk(path):
            prefix = os.path.relpath(folder, data)
            folders[:] = [
                each for each in folders if not is_staged(os.path.normpath(f"{prefix}/{each}"))
            ]
            links = [each for each in folders if os.path.islink(os.path.join(folder, each))]
            yield from (os.path.normpath(f"{prefix}/{each}") for each in [*found, *links])

    names: set[str] = set()
    for pattern in patterns:
        literal = os.path.normpath(pattern)
        exists = os.path.lexists(data / literal)
        for match in [literal] if exists else glob.glob(pattern, root_dir=data, recursive=True):
            names.update(files(os.path.normpath(match)))
    return sorted(name for name in names if not is_staged(name))


def _replace(source: Path, target: Path, transfer: Transfer) -> bool:
    """Put a copy of a file or link in the target's place. Return False for anything else."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        status = source.lstat()
        target.unlink(missing_ok=True)
        os.symlink(os.readlink(source), target)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
    elif source.is_file():
        mode = source.stat().st_mode & 0o777 | 0o600
        # the node may be gone in a second, and its cache with it
        with replace_file(target, mode=mode, sync=True) as file:
            copy_file(str(source), file, transfer)
    else:
        return False
    return True
