"""Detect this machine's resources without importing torch or using a GPU driver."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.contract.gpus import visible_devices
from paceline.errors import EnvironmentProblem, SpecError
from paceline.launch.local_plan import Machine
from paceline.spec.job import Job
from paceline.spec.user_files import expand_home


def detect_machine(environ: Mapping[str, str]) -> Machine:
    """Return the cores and GPUs that a run on this machine may use."""
    gpus = usable_gpus(environ)
    devices = tuple(visible_devices(environ) or ())[:gpus]
    # an allocation may restrict the cores of this process
    may_use = getattr(os, "sched_getaffinity", None)
    cores = len(may_use(0)) if may_use else os.cpu_count() or 1
    return Machine(cores=cores, gpus=gpus, system=platform.system(), devices=devices)


def current_folder() -> Path:
    """Return the current folder."""
    try:
        return Path.cwd()
    except OSError:
        raise EnvironmentProblem(
            "The current folder no longer exists.", hint="Change to a folder that exists."
        ) from None


def interpreter(job: Job) -> str:
    """Return the Python that runs the ranks on this machine: the configured one, the venv's, or
    this one.
    """
    if job.environment.kind in ("conda", "container") and job.is_typed("environment.kind"):
        raise SpecError(
            f"{job.source('environment.kind')} sets kind = {job.environment.kind}, which applies "
            "to `paceline submit`.",
            hint="Use --venv or --python on this machine.",
        )
    if job.environment.kind == "venv" and job.environment.path is None:
        from paceline.launch.environment.store import require_built, resolve_environment

        job = resolve_environment(job, os.environ)
        require_built(job)
    requested = job.environment.python
    if requested is None and job.environment.kind == "venv" and job.environment.path is not None:
        requested = str(expand_home(job.environment.path) / "bin" / "python")
    if requested is None:
        return sys.executable
    found = shutil.which(job.folder / requested if os.sep in requested else requested)
    if found is None:
        key = "environment.python" if job.environment.python else "environment.path"
        raise SpecError(
            f"{job.source(key)} requires {requested}, which is not an executable here.",
            hint="Fix the path.",
        )
    return os.path.abspath(found)


def usable_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return the number of GPUs that a rank could use, by device files: that is what a container
    sees.
    """
    present = len(list(devices.glob("nvidia[0-9]*")))
    if not present and (devices / "kfd").exists():  # AMD
        present = len(list((devices / "dri").glob("renderD*")))
    visible = visible_devices(environ)
    return present if visible is None else min(present, len(visible))
