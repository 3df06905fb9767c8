"""Check what this machine has for a run: Python, torch, scratch, network, Slurm."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.contract.env import POLL_INTERVAL
from paceline.errors import ClusterError, NotConfigured
from paceline.launch.checks.quota import file_system, nearest_existing
from paceline.launch.machine import detect_machine
from paceline.slurm import commands as slurm
from paceline.slurm.partitions import Partition, query_partitions
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.settings import SITE_FILE, find_site

FABRIC = " (InfiniBand)"  # after the name of a device
SHOWN = 3  # interfaces that are named
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
        _scratch(scratch),
        Finding("network", GOOD, describe_interfaces(interfaces())),
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


def _scratch(scratch: Path) -> Finding:
    existing = nearest_existing(scratch)
    if not os.access(existing, os.W_OK):
        return Finding("scratch", PROBLEM, f"Cannot write to {existing}.", "Set PACELINE_SCRATCH.")
    free = shutil.disk_usage(existing).free / 2**30
    return Finding(
        "scratch", GOOD, f"{scratch} ({file_system(existing) or '?'}, {free:.1f} GB free)"
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


def describe_interfaces(found: Sequence[str]) -> str:
    """Name the first interfaces, InfiniBand before others, and count the rest."""
    more = f" + {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more if found else "loopback only"


def interfaces(system: Path = Path("/sys")) -> list[str]:
    """Return the network interfaces that are up, InfiniBand first, without loopback.

    Those without a device, such as bridges of containers, are left out if there are others.
    """
    up = [
        path.parent
        for path in sorted((system / "class/net").glob("*/operstate"))
        if path.parent.name != "lo"
        and path.read_text(encoding="ascii").strip() in ("up", "unknown")
    ]
    # a bond or a VLAN is made of devices
    devices = [
        path
        for path in up
        if (path / "device").exists()
        or (any(path.glob("lower_*")) and not (path / "bridge").exists())
    ]
    fabric = [path.name for path in sorted((system / "class/infiniband").glob("*"))]
    return [*(f"{name}{FABRIC}" for name in fabric), *(path.name for path in devices or up)]


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


def settings() -> dict[str, str]:
    """Return `scontrol show config` by key; empty if Slurm does not respond."""
    try:
        done = slurm.call(["scontrol", "show", "config"], check=False)
    except ClusterError:
        return {}
    pairs = (line.partition("=") for line in done.stdout.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
