"""Job arrays: the cluster's limits, and submission."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence

from paceline.errors import ClusterError
from paceline.slurm import commands as slurm
from paceline.slurm import sbatch
from paceline.slurm.sbatch import BatchJob

DEFAULT_ARRAY_SIZE = 1001  # Slurm's default for MaxArraySize
# count the cluster's jobs only if the submission needs more than a tenth of MaxJobCount
FRACTION = 10
# How sbatch rejects a job because of a limit on the number of jobs.
JOB_LIMIT_REACHED = re.compile(
    r"submit limit|MaxSubmit|job count|MaxJobCount|limit on jobs|Resource temporarily unavailable",
    re.IGNORECASE,
)


def array_size_limit() -> int:
    """Return the largest number of tasks that one array may have."""
    config = _read_config()
    size = int(config.get("MaxArraySize") or DEFAULT_ARRAY_SIZE)
    if size < 2:
        raise ClusterError(
            "This cluster does not allow job arrays (MaxArraySize is 0).",
            hint="Run the sweep on this machine with --local.",
        )
    match = re.search(r"max_array_tasks=(\d+)", config.get("SchedulerParameters", ""))
    return min(size, int(match[1])) if match else size


def max_new_jobs(account: str | None, *, wanted: int | None = None) -> int | None:
    """Return how many more jobs the cluster and the user's association allow, or None if
    unlimited.
    """
    limits = [limit - _own_jobs() for limit in _association_limits(account)]
    cluster_limit = int(_read_config().get("MaxJobCount") or 0)
    # MaxJobCount covers every user's jobs, and listing them all is slow: do it only when it may
    # matter.
    if cluster_limit and (wanted is None or wanted * FRACTION > cluster_limit):
        limits.append(cluster_limit - 1 - _all_jobs())
    return max(1, min(limits)) if limits else None


def _read_config() -> dict[str, str]:
    done = slurm.call(["scontrol", "show", "config"], check=False)
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", done.stdout, re.MULTILINE))


def _association_limits(account: str | None) -> list[int]:
    """Return MaxSubmit of the user's associations; empty on a cluster without accounting."""
    try:
        done = slurm.call(
            [
                "sacctmgr",
                "--noheader",
                "--parsable2",
                "--readonly",
                "show",
                "associations",
                f"user={getpass.getuser()}",
                "format=account,maxsubmit",
            ],
            check=False,
        )
    except (ClusterError, KeyError, OSError):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, _, limit = line.partition("|")
        if limit.strip().isdigit() and (account is None or name == account):
            found.append(int(limit))
    return found


def _all_jobs() -> int:
    done = slurm.call(
        ["squeue", "--all", "--noheader", "--array", "--states=all", "--format=%i"], check=False
    )
    return len(done.stdout.split())


def _own_jobs() -> int:
    done = slurm.call(
        ["squeue", "--all", "--noheader", "--array", "--me", "--format=%i"], check=False
    )
    return len(done.stdout.split())


def submit_array(
    plan: BatchJob,
    *,
    array: str,
    listing: str,
    after: Sequence[str] = (),
    known: Sequence[str] = (),
) -> str:
    """Submit the tasks in `listing` as one array and return its job id.

    `after` are jobs that must end first; `known` are the arrays that are submitted already.
    """
    extra = [f"--array={array}"]
    if after:
        extra.append(f"--dependency=afterany:{':'.join(after)}")
    *command, script = plan.sbatch
    folder = plan.folder.path
    with sbatch.withdrawn_on_failure(plan, folder / f"cancelled-{listing}", known=known):
        return sbatch.run_sbatch(
            [*command, *extra, script, listing], plan.submitter, folder=folder, known=known
        )
