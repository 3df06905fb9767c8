"""Folders on a node's own disk: private, marked with their owner, and removed however the run ends.

<base>/paceline-<uid>/            mode 0700
  run-<run>-<job start>-<node>/   owner.json, data/ (PACELINE_DATA)
  cache/<key>/                    data that `keep` leaves for later jobs
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.contract.files.shared_folders import find_own_folder, make_own_folder, own_folder_name
from paceline.contract.processes.process import pid_namespace, process_start
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem, UsageError
from paceline.staging.request import StagingRequest

JOB_TMP = "SLURM_TMPDIR"


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
    claim: int = 0  # which job start of the run it is
    collected: bool = False


def choose_base(request: StagingRequest, environ: Mapping[str, str]) -> Path:
    """Return the requested folder, else the job's own, else the machine's. Cached data must
    outlive the job.
    """
    own = environ.get(JOB_TMP, "")
    if request.folder:
        folder = _expand(request.folder, environ)
        if request.keep and own and _is_inside(folder, own):
            raise UsageError(
                f"[data] keep: {folder} is inside the job's own folder (${JOB_TMP}), which is "
                "removed with the job.",
                hint="Set folder in [data] to a permanent one, or remove keep.",
            )
        return Path(folder)
    tmp = environ.get("TMPDIR", "")
    if request.keep:
        job = environ.get("SLURM_JOB_ID", "")
        per_job = (own and _is_inside(tmp, own)) or (
            job and any(job in part for part in Path(tmp).parts)
        )
        candidates = [tmp if not per_job else ""]
    else:
        candidates = [own, tmp]
    for folder in candidates:
        if folder and os.path.isdir(folder) and os.access(folder, os.W_OK):
            return Path(folder)
    return Path("/tmp") if request.keep else Path(tempfile.gettempdir())


def private_path(base: Path) -> Path:
    """Return the user's own folder below a base, or where it would be."""
    return find_own_folder(base) or base / own_folder_name()


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


def run_folder_path(private: Path, owner: Owner) -> Path:
    return private / f"run-{owner.run}-{owner.job_start}-{owner.node}"


def make_run_folder(path: Path, owner: Owner) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    write_owner(path, owner)
    (path / "data").mkdir(mode=0o700, exist_ok=True)


def write_owner(path: Path, owner: Owner) -> None:
    write_atomically(path / "owner.json", json.dumps(asdict(owner)), mode=0o600)


def read_owner(path: Path) -> Owner | None:
    try:
        record = json.loads((path / "owner.json").read_text(encoding="utf-8"))
        known = {field.name for field in fields(Owner)}
        return Owner(**{key: value for key, value in record.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def this_process() -> dict[str, Any]:
    """Identify this process for good: process ids are reused, and other namespaces have their
    own.
    """
    pid = os.getpid()
    return {"pid": pid, "started": process_start(pid), "namespace": pid_namespace()}


def free_space(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def check_limit(limit: int, needed: int) -> None:
    """Raise an error if the data is larger than the site allows, before anything is copied."""
    if limit and needed > limit:
        raise EnvironmentProblem(
            f"The data needs {format_size(needed)}, but this site allows {format_size(limit)} of "
            "staged data per node.",
            hint="Stage less. The limit is stage_size in [limits] of /etc/paceline/site.toml.",
        )


def check_free_space(base: Path, needed: int, files: int, *, host: str) -> None:
    """Raise an error if the data does not fit, before anything is copied."""
    free = free_space(base)
    if needed > free:
        raise EnvironmentProblem(
            f"Node {host}: the data needs {format_size(needed)}, but {base} has "
            f"{format_size(free)} free.",
            hint="Stage less, set folder in [data] to a larger disk, or free space with `paceline "
            "clean`.",
        )
    status = os.statvfs(base)
    if status.f_files and files > status.f_favail:
        raise EnvironmentProblem(
            f"Node {host}: the data has {files} files, but {base} can hold only {status.f_favail} "
            "more.",
            hint="Set folder in [data] to another disk.",
        )


def remove_tree(path: Path) -> bool:
    """Remove a folder, read-only parts included. Returns False if some of it stays."""

    def retry(action: Callable[..., Any], name: str, _: Any) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)

    with suppress(OSError):
        if sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=retry)
        else:
            shutil.rmtree(path, onerror=retry)
    return not os.path.lexists(path)


def format_size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand this node's variables in a folder's path, such as /local/$USER/$SLURM_JOB_ID."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise UsageError(
                f"[data] folder: {text!r} uses ${name}, which is not set on this node.",
                hint="Set another folder.",
            )
        return environ[name]

    text = environ.get("HOME", "~") + text[1:] if text == "~" or text.startswith("~/") else text
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def _is_inside(path: str, folder: str) -> bool:
    real, outer = os.path.realpath(path), os.path.realpath(folder)
    return real == outer or real.startswith(outer + "/")
