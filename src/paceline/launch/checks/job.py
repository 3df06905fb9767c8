"""Check a job before it is queued, so that mistakes don't cost a night in the queue."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from paceline.contract.run_folder import USED_BY_JOBS
from paceline.launch.checks.data import check_data
from paceline.launch.checks.program import check_program
from paceline.launch.checks.quota import MOUNTS, check_quota, file_system, nearest_existing
from paceline.launch.environment.store import check_built
from paceline.launch.slurm_plan import SlurmPlan
from paceline.slurm.limits import check_limits, check_with_slurm
from paceline.slurm.partitions import Partition
from paceline.spec.findings import GOOD, PROBLEM, WARNING, Finding
from paceline.spec.job import Job

LITTLE_SPACE, NO_SPACE = 2 * 2**30, 64 * 2**20


def check_job(job: Job, plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Run every check, the quick and certain ones first. Slurm checks the real script last."""
    built = check_built(job)
    if any(each.level == PROBLEM for each in built):
        return built
    found = [
        *built,
        *check_program(job, plan),
        *check_python_path(job, plan),
        *check_folder(plan, partitions),
        *check_data(job, plan.run_path, os.environ),
        *check_limits(job, plan, partitions),
    ]
    if any(each.level == PROBLEM for each in found):
        return found
    return [*found, check_with_slurm(job, plan, partitions)]


_LOCAL = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")


def check_folder(plan: SlurmPlan, partitions: Sequence[Partition]) -> list[Finding]:
    """Check that all nodes are likely to see the run folder, and that it has free space.

    A scratch folder that a job has written to needs no warning, whatever disk it is on; nor does
    one of the sandbox, whose nodes are on this machine.
    """
    scratch = plan.run_path.scratch
    existing = nearest_existing(scratch)
    if not os.access(existing, os.W_OK | os.X_OK):
        hint = "Choose another with [project] scratch or PACELINE_SCRATCH."
        text = f"You cannot write to the scratch folder {scratch}."
        return [Finding("run folder", PROBLEM, text, hint)]
    kind = file_system(existing)
    folder = Finding("run folder", GOOD, f"{scratch} ({kind or 'file system unknown'})")
    is_proven = os.path.exists(scratch / USED_BY_JOBS) or _is_sandbox()
    if kind in _LOCAL and partitions and not is_proven:
        text = f"{scratch} is on a local disk of {_host()} ({kind}), which the nodes may not see."
        hint = "Choose a shared folder with [project] scratch or PACELINE_SCRATCH."
        folder = Finding("run folder", WARNING, text, hint)
    free = shutil.disk_usage(existing).free
    space = Finding("free space", GOOD, f"{free / 2**30:.1f} GB free")
    if free < LITTLE_SPACE:
        level = PROBLEM if free < NO_SPACE else WARNING
        text = f"The scratch folder {scratch} has little space left: {space.text}."
        hint = "Remove old runs, or choose another scratch folder."
        space = Finding("free space", level, text, hint)
    return [folder, space, *check_quota(existing)]


def _is_sandbox() -> bool:
    conf = Path(os.environ.get("SLURM_CONF", os.devnull))
    return os.access(conf, os.R_OK) and "ClusterName=sandbox\n" in conf.read_text(
        "utf-8", "replace"
    )


def _host() -> str:
    return socket.gethostname().split(".")[0]


def check_python_path(job: Job, plan: SlurmPlan, mounts: Path = MOUNTS) -> list[Finding]:
    """Warn about a Python on a local disk of this host when the scratch folder is shared: nodes may
    not find it.

    The system's own Python is on every node. If the scratch folder is local too, `check_folder`
    warns about that.
    """
    python = Path(plan.launch_spec.python)
    is_system = str(python).startswith(("/usr/", "/bin/", "/opt/"))
    if job.environment.kind == "container" or not python.is_absolute() or is_system:
        return []
    kind, other = (
        file_system(nearest_existing(path), mounts) for path in (python, plan.run_path.scratch)
    )
    if kind not in _LOCAL or other in _LOCAL:
        return []
    text = f"{python} is on a local disk of {_host()} ({kind}), which the nodes may not see."
    return [Finding("python", WARNING, text, "Build one on a shared disk: paceline env build")]
