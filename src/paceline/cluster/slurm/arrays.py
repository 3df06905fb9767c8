"""Job arrays: what the cluster allows, and one call of sbatch."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence

from paceline.cluster.slurm import commands as slurm
from paceline.errors import ClusterError
from paceline.plan.slurm.plan import SlurmPlan

DEFAULT_ARRAY_SIZE = 1001  # Slurm's own default of MaxArraySize
FEW = 10  # so many times fewer than the cluster may hold are no reason to count what it holds
# What sbatch says where a limit on the number of jobs, and not the job itself, is in the way.
JOB_LIMIT_REACHED = re.compile(
    r"submit limit|MaxSubmit|job count|MaxJobCount|limit on jobs|Resource temporarily unavailable",
    re.IGNORECASE,
)


def array_size_limit() -> int:
    """Tasks that one array may have."""
    told = _configuration()
    size = int(told.get("MaxArraySize") or DEFAULT_ARRAY_SIZE)
    if size < 2:
        raise ClusterError(
            "this cluster takes no job arrays (MaxArraySize is 0)", hint="run the sweep here: --local"
        )
    match = re.search(r"max_array_tasks=(\d+)", told.get("SchedulerParameters", ""))
    return min(size, int(match[1])) if match else size


def max_new_jobs(account: str | None, *, wanted: int | None = None) -> int | None:
    """Jobs that one more submission may bring, by what the cluster and the user's association allow."""
    limits = [limit - _own_jobs() for limit in _association_limits(account)]
    whole = int(_configuration().get("MaxJobCount") or 0)
    # The controller counts all that it remembers of everybody's, which takes time to list: only where it may matter.
    if whole and (wanted is None or wanted * FEW > whole):
        limits.append(whole - 1 - _remembered_jobs())
    return max(1, min(limits)) if limits else None


def _configuration() -> dict[str, str]:
    done = slurm.call(["scontrol", "show", "config"], check=False)
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", done.stdout, re.MULTILINE))


def _association_limits(account: str | None) -> list[int]:
    """MaxSubmit of the user's associations. Not every cluster keeps accounts: then nothing is known."""
    try:
        done = slurm.call(
            ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "associations", f"user={getpass.getuser()}",
             "format=account,maxsubmit"],
            check=False,
        )  # fmt: skip
    except (ClusterError, KeyError, OSError):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, _, limit = line.partition("|")
        if limit.strip().isdigit() and (account is None or name == account):
            found.append(int(limit))
    return found


def _remembered_jobs() -> int:
    done = slurm.call(["squeue", "--noheader", "--array", "--states=all", "--format=%i"], check=False)
    return len(done.stdout.split())


def _own_jobs() -> int:
    done = slurm.call(["squeue", "--noheader", "--array", "--me", "--format=%i"], check=False)
    return len(done.stdout.split())


def submit_array(plan: SlurmPlan, *, array: str, listing: str, after: Sequence[str] = ()) -> str:
    """One call of sbatch for the tasks of a list; the array's job id. `after` are jobs that must be over first."""
    extra = [f"--array={array}"]
    if after:
        extra.append(f"--dependency=afterany:{':'.join(after)}")
    words = plan.sbatch
    return slurm.run_sbatch([*words[:-1], *extra, words[-1], listing], plan.submitter)
