"""Check what this machine has for a run: Python, torch, scratch, Slurm."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.contract.env import POLL_INTERVAL
from paceline.errors import ClusterError, NotConfigured
from paceline.launch.checks.disk import check_disk
from paceline.launch.machine import detect_machine
from paceline.slurm import commands as slurm
from paceline.slurm.partitions import Partition, query_partitions
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.settings import SITE_FILE, find_site

# Variables in which clusters name their large, fast, shared folders.
SCRATCH_VARIABLES = (
    "SCRATCH",
    "PSCRATCH",
    "WORK",
    "SCRATCH_DIR",
    "GSCRATCH",
    "CSCRATCH",
    "WRKDIR",
    "SCRATCHDIR",
)


def inspect_machine(environ: Mapping[str, str], scratch: Path) -> list[Finding]:
    """Check everything but the scheduler."""
    machine = detect_machine(environ)
    found = [
        Finding("python", GOOD, f"{platform.python_version()} ({sys.executable})"),
        _torch(),
        Finding("machine", GOOD, f"{machine.cores} cores, {machine.gpus} GPUs, {machine.system}"),
        Finding("scratch", GOOD, str(scratch)),
        check_disk(scratch),
    ]
    if "SLURM_JOB_ID" in environ:
        nodes = environ.get("SLURM_JOB_NODELIST", "?")
        found.append(
            Finding("allocation", GOOD, f"inside job {environ['SLURM_JOB_ID']} on {nodes}")
        )
    return found


def _torch() -> Finding:
    try:
        return Finding("torch", GOOD, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch",
            WARNING,
            "This Python has no torch.",
            "Fine on a login node if jobs use another environment. Otherwise: pip install torch",
        )


def inspect_site(environ: Mapping[str, str]) -> list[Finding]:
    """Say what the site sets; nothing if it has no file."""
    site = find_site()
    if not (text := site.describe()):
        return []
    found = [Finding("site", GOOD, f"{text} ({SITE_FILE})")]
    interval, chosen = site.limits.poll_interval, environ.get(POLL_INTERVAL, "")
    if interval and chosen.isdigit() and int(chosen) < interval:
        why = f"{POLL_INTERVAL} is {chosen}, but this site asks Slurm every {interval} s at most."
        hint = f"The limit is poll_interval in [limits] of {SITE_FILE}."
        found.append(Finding("site", WARNING, why, hint))
    return found


def inspect_slurm() -> list[Finding]:
    """Check the scheduler, as far as it responds."""
    if not slurm.available():
        return [
            Finding(
                "slurm",
                WARNING,
                "There is no sbatch here.",
                "Use `paceline run`, or start a cluster here: paceline sandbox up",
            )
        ]
    version = slurm.version()
    text = f"{version[0]}.{version[1]:02d}" if version else "version unknown"
    if version and version < (22, 5):
        return [
            Finding(
                "slurm", WARNING, f"Slurm {text} is older than 22.05, the oldest tested version."
            )
        ]
    try:
        partitions = query_partitions()
    # its packages are here, as on a laptop that only has the commands
    except NotConfigured as error:
        return [Finding("slurm", WARNING, error.message, error.hint)]
    except ClusterError as error:
        reason = f"Slurm ({text}) does not respond: {error.message}"
        return [Finding("slurm", PROBLEM, reason, error.hint)]
    found = [Finding("slurm", GOOD, f"{text}, {len(partitions)} partitions")]
    return found + [
        Finding(f"  {each.name}", GOOD if each.is_up else WARNING, describe(each))
        for each in partitions
    ]


def describe(partition: Partition) -> str:
    """Describe a partition in one line."""
    from paceline.spec.quantities import show_seconds

    gpus = ", ".join(f"{count} x {name or 'gpu'}" for name, count in partition.gpu_types.items())
    limit = show_seconds(partition.max_time) if partition.max_time else "no limit"
    cpus = max((kind.cpus for kind in partition.kinds), default=0)
    usable = sum(kind.count for kind in partition.kinds if kind.usable)
    parts = [
        f"{usable} of {partition.nodes} nodes usable",
        f"{cpus} cores",
        gpus or "no GPUs",
        limit,
    ]
    return ", ".join([*parts, *(["the default"] if partition.is_default else [])])
