"""What is wrong with a job before it is queued: a wasted night in the queue is what hurts most."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from paceline.cluster.checks.data import check_data
from paceline.cluster.checks.finding import GOOD, PROBLEM, WARNING, Finding
from paceline.cluster.checks.program import check_program
from paceline.cluster.checks.quota import MOUNTS, check_quota, mount_of
from paceline.cluster.environment.store import check_built
from paceline.cluster.slurm.limits import check_limits, check_with_slurm
from paceline.cluster.slurm.partitions import Partition
from paceline.plan.slurm.plan import SlurmPlan
from paceline.spec import Job

LITTLE_SPACE, NO_SPACE = 2 * 2**30, 64 * 2**20


def check_job(job: Job, plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Every check, the quick and certain ones first. Slurm itself is asked last, with the real script."""
    built = check_built(job)
    if any(each.level == PROBLEM for each in built):
        return built
    found = [
        *built,
        *check_program(job, plan), *check_python_place(job, plan), *check_folder(plan, partitions),
        *check_data(job, plan.run_path, os.environ), *check_limits(job, plan, partitions),
    ]  # fmt: skip
    if any(each.level == PROBLEM for each in found):
        return found
    return [*found, check_with_slurm(job, plan, partitions)]


_LOCAL = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")


def check_folder(plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Whether all nodes are likely to see the run folder, and whether there is room in it."""
    scratch = plan.run_path.scratch
    there = next(path for path in (scratch, *scratch.parents) if path.exists())
    found = []
    kind = file_system(there)
    host = socket.gethostname().split(".")[0]
    if kind in _LOCAL and partitions:
        found.append(
            Finding(
                "run folder", WARNING, f"{scratch} is on a disk of {host} ({kind}): do the nodes see it?",
                "if not, choose a shared folder: [project] scratch, or PACELINE_SCRATCH",
            )
        )  # fmt: skip
    else:
        found.append(Finding("run folder", GOOD, f"{scratch} ({kind or 'file system unknown'})"))
    free = shutil.disk_usage(there).free
    text = f"{free / 2**30:.1f} GB free"
    level = PROBLEM if free < NO_SPACE else WARNING if free < LITTLE_SPACE else GOOD
    hint = "" if level == GOOD else "remove old runs, or choose another scratch folder"
    return [*found, Finding("free space", level, text, hint), *check_quota(there)]


def check_python_place(job: Job, plan: SlurmPlan, mounts: Path = MOUNTS) -> list[Finding]:
    """A Python on a disk of this host beside a scratch folder that is shared: the nodes will not find it.

    Systems' own Pythons are every node's, and where the scratch folder is on a disk too, that is said of it already.
    """
    python = Path(plan.launch_spec.python)
    system = ("/usr/", "/bin/", "/opt/")
    if job.environment.kind == "container" or not python.is_absolute() or str(python).startswith(system):
        return []
    places = [
        next(path for path in (each, *each.parents) if path.exists())
        for each in (python, plan.run_path.scratch)
    ]
    kinds = [file_system(place, mounts) for place in places]
    if kinds[0] not in _LOCAL or kinds[1] in _LOCAL:
        return []
    host = socket.gethostname().split(".")[0]
    text = f"{python} is on a disk of {host} ({kinds[0]}): do the nodes see it?"
    return [Finding("python", WARNING, text, "if not, build one on shared disk: paceline env build")]


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system that a path is on; empty where nobody says."""
    return mount_of(path, mounts).kind
