"""Folders on a node's own disk: private, each with a marker that says whose it is, and removed in every ending.

<base>/paceline-<uid>/           0700
  run-<run>-<job start>-<node>/        owner.json, data/ (PACELINE_DATA)
  kept/<key>/                    what `keep` leaves for later jobs
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.agent.staging.request import StagingRequest
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem, UsageError

JOB_TMP = "SLURM_TMPDIR"


@dataclass(frozen=True)
class Owner:
    """Who made a folder: a job of the scheduler's, or a process of this machine."""

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


def choose_base(wish: StagingRequest, environ: Mapping[str, str]) -> Path:
    """The folder that was asked for, else the job's own, else the machine's. What is kept outlives the job."""
    own = environ.get(JOB_TMP, "")
    if wish.folder:
        folder = _on_this_node(wish.folder, environ)
        if wish.keep and own and _inside(folder, own):
            raise UsageError(
                f"[data] keep: {folder} is the job's own folder (${JOB_TMP}), which ends with the job",
                hint="set folder in [data] to one that stays, or leave keep out",
            )
        return Path(folder)
    tmp = environ.get("TMPDIR", "")
    if wish.keep:
        job = environ.get("SLURM_JOB_ID", "")
        per_job = (own and _inside(tmp, own)) or (job and any(job in part for part in Path(tmp).parts))
        candidates = [tmp if not per_job else ""]
    else:
        candidates = [own, tmp]
    for each in candidates:
        if each and os.path.isdir(each) and os.access(each, os.W_OK):
            return Path(each)
    return Path("/tmp") if wish.keep else Path(tempfile.gettempdir())


def private_folder(base: Path) -> Path:
    """The user's own folder below a base, made where it is not there; somebody else's is refused."""
    path = base / f"paceline-{os.geteuid()}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        about = os.lstat(path)
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot make a folder for data in {base}: {problem.strerror}",
            hint="set folder in [data] to one on the nodes' own disks that you may write to",
        ) from None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise EnvironmentProblem(
            f"{path} is not a folder of yours, expected one that only you can read",
            hint="set folder in [data] to another place, and tell the administrators",
        )
    if stat.S_IMODE(about.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder that this user has made, and no link: in /tmp anybody may have been there first."""
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def run_folder(private: Path, owner: Owner) -> Path:
    return private / f"run-{owner.run}-{owner.job_start}-{owner.node}"


def make_run_folder(path: Path, owner: Owner) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    write_owner(path, owner)
    (path / "data").mkdir(mode=0o700, exist_ok=True)


def write_owner(path: Path, owner: Owner) -> None:
    write_atomically(path / "owner.json", json.dumps(asdict(owner)), mode=0o600)


def read_owner(path: Path) -> Owner | None:
    try:
        value = json.loads((path / "owner.json").read_text(encoding="utf-8"))
        known = {each.name for each in fields(Owner)}
        return Owner(**{key: each for key, each in value.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def this_process() -> dict[str, Any]:
    """What names a process for good: ids are used again, by other processes and in other namespaces."""
    return {"pid": os.getpid(), "started": start_of(os.getpid()), "namespace": namespace()}


def start_of(pid: int) -> str:
    """When a process began, in the kernel's own words, with the boot that it began in; empty when there is none."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, IndexError):
        return ""
    return "" if ticks[0] in (b"Z", b"X") else f"{boot} {int(ticks[19])}"


def namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def check_free_space(base: Path, needed: int, files: int, *, host: str) -> None:
    """Not enough room is known before anything is copied."""
    about = os.statvfs(base)
    free = about.f_bavail * about.f_frsize
    if needed > free:
        raise EnvironmentProblem(
            f"node {host}: the data needs {format_size(needed)}, and {base} has {format_size(free)} free",
            hint="stage less, choose a larger disk by folder in [data], or look at `paceline clean`",
        )
    if about.f_files and files > about.f_favail:
        raise EnvironmentProblem(
            f"node {host}: the data has {files} files, and {base} has room for {about.f_favail}",
            hint="choose another disk by folder in [data]",
        )


def remove_tree(path: Path) -> bool:
    """Take a folder away, also where somebody has made parts of it read-only. False when some of it stays."""

    def mend(action: Callable[..., Any], name: str, _: Any) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)

    with suppress(OSError):
        if sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=mend)
        else:
            shutil.rmtree(path, onerror=mend)
    return not os.path.lexists(path)


def format_size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _on_this_node(text: str, environ: Mapping[str, str]) -> str:
    """A folder's path with this node's variables in it, such as /local/$USER/$SLURM_JOB_ID."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise UsageError(
                f"[data] folder: {text!r} names ${name}, which is not set on this node",
                hint="write another folder",
            )
        return environ[name]

    text = environ.get("HOME", "~") + text[1:] if text == "~" or text.startswith("~/") else text
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def _inside(path: str, folder: str) -> bool:
    real, outer = os.path.realpath(path), os.path.realpath(folder)
    return real == outer or real.startswith(outer + "/")
