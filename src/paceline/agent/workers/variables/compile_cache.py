"""Where torch keeps code that it has compiled, so that the next job of a project need not compile it again.

Torch's own defaults are the temporary folder, which most clusters empty after each job, and the home folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path

from paceline.contract.files.shared_places import make_own_folder
from paceline.contract.launch_spec import LaunchSpec

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch.compile; Triton's files are in it, too
EXTENSIONS = "TORCH_EXTENSIONS_DIR"  # C++ and CUDA extensions that are built when they are imported


def compile_cache_variables(launch_spec: LaunchSpec) -> dict[str, str]:
    """Return the variables for torch. Empty if there is no folder of this user alone: torch runs code from it."""
    if not launch_spec.scratch:
        return {}
    try:
        own = make_own_folder(_shared_cache(Path(launch_spec.scratch)))
        if own.stat().st_uid != os.geteuid():  # a server that gives all files to one user: there, nothing is private
            own.rmdir()
            return {}
        project = Path(launch_spec.project or "default", node_image())
        # Torch tells interpreters apart only in its default folder.
        python = hashlib.sha256(os.fsencode(launch_spec.python)).hexdigest()[:12]
        folders = {CACHE: own / "compile" / project, EXTENSIONS: own / "extensions" / project / python}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a full disk, or a folder that only others may write
        return {}
    return {name: str(folder) for name, folder in folders.items()}


def _shared_cache(scratch: Path) -> Path:
    """Return the folder for caches of all users of a scratch folder: who may write there may write here."""
    path = scratch / ".cache"
    try:
        path.mkdir()
    except FileExistsError:
        return path
    mode = stat.S_IMODE(scratch.stat().st_mode)
    others = stat.S_IWGRP | stat.S_IWOTH
    path.chmod(mode | stat.S_ISVTX if mode & others else mode)  # nobody may rename or remove a folder of others
    return path


def node_image() -> str:
    """Return a name for nodes that can run each other's compiled code: the same system and kind of processor.

    Torch itself tells GPUs and its versions apart, but it compiles for the processor that it runs on.
    """
    facts = [platform.machine(), *platform.libc_ver()]
    try:
        system = platform.freedesktop_os_release()
        facts += [system.get("ID", ""), system.get("VERSION_ID", "")]
    except OSError:
        pass
    return f"{platform.machine()}-{hashlib.sha256('|'.join([*facts, _processor()]).encode()).hexdigest()[:12]}"


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
