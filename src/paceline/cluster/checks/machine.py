"""This machine, looked at for what a run needs: Python, torch, scratch, Slurm, network."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.cluster.checks.finding import GOOD, PROBLEM, WARNING, Finding
from paceline.cluster.checks.job import file_system
from paceline.cluster.local.machine import detect_machine
from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.partitions import Partition, query_partitions
from paceline.errors import ClusterError

# Where clusters put large, fast, shared folders, by the names that they give them.
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
    """Everything but the scheduler."""
    machine = detect_machine(environ)
    found = [
        Finding("python", GOOD, f"{platform.python_version()} ({sys.executable})"),
        _torch(),
        Finding("machine", GOOD, f"{machine.cores} cores, {machine.gpus} GPUs, {machine.system}"),
        _scratch(scratch),
        Finding("network", GOOD, ", ".join(interfaces()) or "loopback only"),
    ]
    if "SLURM_JOB_ID" in environ:
        nodes = environ.get("SLURM_JOB_NODELIST", "?")
        found.append(Finding("allocation", GOOD, f"inside job {environ['SLURM_JOB_ID']} on {nodes}"))
    return found


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding(
            "torch", WARNING, "not in this Python",
            "fine on a login node whose jobs use another environment; else: pip install torch",
        )  # fmt: skip
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding("torch", GOOD, version("torch"))
    except PackageNotFoundError:
        return Finding("torch", GOOD, "found, of unknown version")


def _scratch(scratch: Path) -> Finding:
    there = next(path for path in (scratch, *scratch.parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Finding("scratch", PROBLEM, f"{there} cannot be written to", "set PACELINE_SCRATCH")
    free = shutil.disk_usage(there).free / 2**30
    return Finding("scratch", GOOD, f"{scratch} ({file_system(there) or '?'}, {free:.1f} GB free)")


def interfaces() -> list[str]:
    """Network interfaces that are up, fabric first; loopback left out."""
    found = []
    for path in sorted(Path("/sys/class/net").glob("*")):
        try:
            state = (path / "operstate").read_text(encoding="ascii").strip()
        except OSError:
            continue
        if path.name != "lo" and state in ("up", "unknown"):
            found.append(path.name)
    fabric = [path.name for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    return [*(f"{name} (InfiniBand)" for name in fabric), *found]


def inspect_slurm() -> list[Finding]:
    """The scheduler, as far as it answers."""
    if not slurm.available():
        return [
            Finding(
                "slurm", WARNING, "no sbatch here", "`paceline run` works; for a cluster: paceline sandbox up"
            )
        ]
    version = slurm.version()
    text = f"{version[0]}.{version[1]:02d}" if version else "of unknown version"
    if version and version < (22, 5):
        return [Finding("slurm", WARNING, text, "22.05 is the oldest that is tested")]
    try:
        partitions = query_partitions()
    except ClusterError as error:
        return [Finding("slurm", PROBLEM, f"{text}, but it does not answer: {error.message}", error.hint)]
    found = [Finding("slurm", GOOD, f"{text}, {len(partitions)} partitions")]
    return found + [
        Finding(f"  {each.name}", GOOD if each.is_up else WARNING, describe(each)) for each in partitions
    ]


def describe(partition: Partition) -> str:
    """A partition in one line."""
    from paceline.spec.quantities import show_seconds

    gpus = ", ".join(f"{count} x {name or 'gpu'}" for name, count in partition.gpu_types.items())
    limit = show_seconds(partition.max_time) if partition.max_time else "no limit"
    cpus = max((kind.cpus for kind in partition.kinds), default=0)
    usable = sum(kind.count for kind in partition.kinds if kind.usable)
    parts = [f"{usable} of {partition.nodes} nodes usable", f"{cpus} cores", gpus or "no GPUs", limit]
    return ", ".join([*parts, *(["the default"] if partition.is_default else [])])


def settings() -> dict[str, str]:
    """`scontrol show config`, by key; empty where it does not answer."""
    try:
        done = slurm.call(["scontrol", "show", "config"], check=False)
    except ClusterError:
        return {}
    pairs = (line.partition("=") for line in done.stdout.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}
