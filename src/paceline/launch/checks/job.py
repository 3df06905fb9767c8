"""Check a job before it is queued, so that mistakes don't cost a night in the queue."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.run_folder import USED_BY_JOBS
from paceline.launch.checks.data import check_data
from paceline.launch.checks.disk import check_disk, file_system, nearest_existing
from paceline.launch.checks.program import check_program
from paceline.launch.environment.store import check_built
from paceline.launch.slurm_plan import SlurmPlan
from paceline.slurm.limits import check_limits, check_with_slurm
from paceline.slurm.partitions import Partition
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job


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
