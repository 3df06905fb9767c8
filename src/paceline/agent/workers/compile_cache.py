"""Where torch keeps code that it has compiled, so that the next job of a project need not compile
it again.

Torch's own defaults are the temporary folder, which most clusters empty after each job, and the
home folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path

from paceline.contract.launch_spec import LaunchSpec

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch.compile; Triton's files are in it, too
EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # C++ and CUDA extensions that are built when they are imported


def compile_cache_variables(launch_spec: LaunchSpec) -> dict[str, str]:
    """Return the variables for torch. Empty if there is no folder of this user alone: torch runs
    code from it.
    """
    if not launch_spec.scratch:
        return {}
    try:
        own = _own_folder(Path(launch_spec.scratch))
        if own is None:
            return {}
        project = Path(launch_spec.project or "default", node_image())
        # Torch tells interpreters apart only in its default folder.
        python = hashlib.sha256(os.fsencode(launch_spec.python)).hexdigest()[:12]
        folders = {
            CACHE: own / "compile" / project,
            EXTENSIONS: own / "extensions" / project / python,
        }
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a full disk, or a folder that only others may write
        return {}
    return {name: str(folder) for name, folder in folders.items()}


def _own_folder(scratch: Path) -> Path | None:
    """Return this user's own folder for caches; None if others could change it, or put another one
    in its place.
    """
    parent, path = scratch.stat(), scratch / f".cache-{os.geteuid()}"
    if parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not parent.st_mode & stat.S_ISVTX:
        return None  # everybody who may write there may rename it
    path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    status = path.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
    return path if is_private and status.st_uid == os.geteuid() else None


def node_image() -> str:
    """Return a name for nodes that can run each other's compiled code: the same system and kind of
    processor.

    Torch itself tells GPUs and its versions apart, but it compiles for the processor that it runs
    on.
    """
    facts = [platform.machine(), *platform.libc_ver()]
    try:
        system = platform.freedesktop_os_release()
        facts += [system.get("ID", ""), system.get("VERSION_ID", "")]
    except OSError:
        pass
    digest = hashlib.sha256("|".join([*facts, _processor()]).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _processor() -> str:
    """Return the instructions that the first processor knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()
