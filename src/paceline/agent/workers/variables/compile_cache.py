"""Where torch.compile keeps what it has compiled, so that the next job of a project need not compile it again.

Torch's own default is the temporary folder, which most clusters empty after each job.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path

from paceline.contract.launch_spec import LaunchSpec

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's files are in it, too


def compile_cache_variables(launch_spec: LaunchSpec) -> dict[str, str]:
    """Return the variable for torch. Empty if there is no folder of this user alone: torch runs code from it."""
    if not launch_spec.scratch:
        return {}
    path = Path(launch_spec.scratch, ".cache", "compile", launch_spec.project or "default", node_image())
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
        found = path.lstat()
    except OSError:  # a full disk, or a folder that only others may write
        return {}
    return {CACHE: str(path)} if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else {}


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
