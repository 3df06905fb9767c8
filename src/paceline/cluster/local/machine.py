"""What this machine has, asked without torch and without touching a driver."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline
from paceline.contract.gpus import visible_devices
from paceline.errors import EnvironmentProblem
from paceline.plan.shape import Machine
from paceline.spec import Job


def detect_machine(environ: Mapping[str, str]) -> Machine:
    gpus = usable_gpus(environ)
    devices = tuple(visible_devices(environ) or ())[:gpus]
    return Machine(cores=usable_cores(), gpus=gpus, system=platform.system(), devices=devices)


def current_folder() -> Path:
    """The current folder."""
    try:
        return Path.cwd()
    except OSError:
        raise EnvironmentProblem("the current folder is gone", hint="cd to a folder that exists") from None


def interpreter(job: Job) -> str:
    """The Python of the ranks of a run on this machine: the one named, that of the venv, or this one."""
    if job.environment.kind == "venv" and job.environment.path is None:
        from paceline.cluster.environment.store import refuse_unbuilt, settle

        job = settle(job, os.environ)
        refuse_unbuilt(job)
    asked = job.environment.python
    if asked is None and job.environment.kind == "venv" and job.environment.path is not None:
        asked = str(Path(job.environment.path).expanduser() / "bin" / "python")
    if asked is None:
        return sys.executable
    found = shutil.which(job.folder / asked if os.sep in asked else asked)
    if found is None:
        key = "environment.python" if job.environment.python else "environment.path"
        raise EnvironmentProblem(
            f"{job.source(key)} means {asked}, which is no program here", hint="mend the path"
        )
    return os.path.abspath(found)


def usable_cores() -> int:
    """Cores that this process may use: an allocation may have bound it to a few."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that a rank could use. Device files are what a container is given, so they are what counts."""
    present = len(list(devices.glob("nvidia[0-9]*"))) or _amd_gpus(devices)
    visible = visible_devices(environ)
    return present if visible is None else min(present, len(visible))


def _amd_gpus(devices: Path) -> int:
    if not (devices / "kfd").exists():
        return 0
    return len(list((devices / "dri").glob("renderD*")))


def host_details() -> dict[str, Any]:
    """Who and where, for run.json."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid()) if hasattr(os, "getuid") else ""
    return {
        "host": socket.gethostname(),
        "user": user,
        "python": sys.executable,
        "python_version": platform.python_version(),
        "paceline_version": paceline.__version__,
    }
