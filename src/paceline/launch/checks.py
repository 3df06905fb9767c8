"""Check a job before it is queued, so that mistakes do not cost a night in the queue."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.run_folder import USED_BY_JOBS
from paceline.errors import ClusterError, NotConfigured, PacelineError
from paceline.launch.check_program import check_program
from paceline.launch.environment.store import check_built
from paceline.launch.launch_spec import data_settings, staging_request
from paceline.launch.local_run import detect_machine
from paceline.slurm import commands as slurm
from paceline.slurm.limits import check_limits, check_with_slurm
from paceline.slurm.partitions import Partition, query_partitions
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job
from paceline.spec.run_path import RunPath
from paceline.spec.settings import SITE_FILE, find_site
from paceline.staging.request import check_sources

if TYPE_CHECKING:
    from paceline.launch.slurm_job import SlurmPlan


def check_data(job: Job, run_path: RunPath, environ: Mapping[str, str]) -> list[Finding]:
    """Check that every path to stage exists. Jobs that stage nothing get no finding."""
    if not data_settings(job):
        return []
    try:
        request = staging_request(job, scratch=run_path.scratch, environ=environ)
        check_sources(request)
    except PacelineError as error:
        return [Finding("data", PROBLEM, error.message, error.hint)]
    return [
        Finding(
            "data", GOOD, f"{len(request.items)} paths to stage, {len(request.collect)} to collect"
        )
    ]


LITTLE_SPACE, NO_SPACE = 2 * 2**30, 64 * 2**20
TEST_WRITE = 2**20  # bytes
MOUNTS = Path("/proc/mounts")
ELSEWHERE = "choose another folder with [project] scratch or PACELINE_SCRATCH."


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that this user can see."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Return the type of the file system that a path is on; empty if unknown."""
    best = kind_there = ""
    text = mounts.read_text(encoding="utf-8", errors="replace") if mounts.exists() else ""
    real = f"{path.resolve()}/"
    for line in text.splitlines():
        _, point, kind = (word.replace("\\040", " ") for word in line.split()[:3])
        if real.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind_there = point, kind
    return kind_there


def check_disk(folder: Path) -> Finding:
    """Check with a test write that a folder, or the one that it will be created in, takes files."""
    existing = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(os.urandom(TEST_WRITE))
            file.flush()
            os.fsync(file.fileno())  # a quota may be noticed only now
    except OSError as error:
        text = f"You cannot write to the scratch folder {folder}: {error.strerror}."
        return Finding("disk", PROBLEM, text, f"Make room there, or {ELSEWHERE}")
    free = shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GB free"
    if free >= LITTLE_SPACE:
        return Finding("disk", GOOD, text)
    level = PROBLEM if free < NO_SPACE else WARNING
    text = f"The scratch folder {folder} has little space left: {text}."
    return Finding("disk", level, text, f"Remove old runs (paceline clean), or {ELSEWHERE}")


def check_job(job: Job, plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Run every check, the quick and certain ones first. Slurm checks the real script last."""
    built = check_built(job)
    if any(each.level == PROBLEM for each in built):
        return built
    found = [
        *built,
        *check_program(job, plan),
        *check_folder(plan, partitions),
        *check_data(job, plan.run_path, os.environ),
        *check_limits(job, plan, partitions),
    ]
    if any(each.level == PROBLEM for each in found):
        return found
    return [*found, check_with_slurm(job, plan, partitions)]


_LOCAL = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")


def check_folder(plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Check that the run folder can be written, and that all nodes are likely to see it.

    A scratch folder that a job has written to needs no warning, whatever disk it is on; nor does
    one of the sandbox, whose nodes are on this machine.
    """
    scratch = plan.run_path.scratch
    disk = check_disk(scratch)
    if disk.level == PROBLEM:
        return [disk]
    kind = file_system(nearest_existing(scratch))
    is_proven = os.path.exists(scratch / USED_BY_JOBS) or _is_sandbox()
    if kind in _LOCAL and partitions and not is_proven:
        host = socket.gethostname().split(".")[0]
        text = f"{scratch} is on a local disk of {host} ({kind}), which the nodes may not see."
        hint = "Choose a shared folder with [project] scratch or PACELINE_SCRATCH."
        return [Finding("run folder", WARNING, text, hint), disk]
    text = f"{scratch} ({kind or 'file system unknown'})"
    return [Finding("run folder", GOOD, text), disk]


def _is_sandbox() -> bool:
    conf = Path(os.environ.get("SLURM_CONF", os.devnull))
    return os.access(conf, os.R_OK) and "ClusterName=sandbox\n" in conf.read_text(
        "utf-8", "replace"
    )


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


def inspect_site() -> list[Finding]:
    """Say what the site sets; nothing if it has no file."""
    site = find_site()
    if not (text := site.describe()):
        return []
    return [Finding("site", GOOD, f"{text} ({SITE_FILE})")]


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
    try:
        partitions = query_partitions()
    # its packages are here, as on a laptop that only has the commands
    except NotConfigured as error:
        return [Finding("slurm", WARNING, error.message, error.hint)]
    except ClusterError as error:
        reason = f"Slurm does not respond: {error.message}"
        return [Finding("slurm", PROBLEM, reason, error.hint)]
    found = [Finding("slurm", GOOD, f"{slurm.version()}, {len(partitions)} partitions")]
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
