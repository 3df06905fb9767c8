"""The variables by which torchrun, MPI and Slurm number the processes that they start: one table
for all readers; and Slurm's lists of hosts, which nodes without `scontrol` have to expand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.contract import env
from paceline.errors import UsageError

# `srun` numbers its steps from 0. The batch script, an interactive shell and the external step have
# reserved numbers or names: SLURM_PROCID=0 there does not mean rank 0 of SLURM_NTASKS.
_FIRST_RESERVED_STEP = 0xFFFFFFF0

# These variables are options of squeue, scancel, sacct and sinfo.
_SLURM_OPTIONS = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_")


@dataclass(frozen=True)
class RankVariables:
    """The variables that one launcher sets. An empty name means that it does not set such a
    variable.
    """

    source: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node: str = ""
    num_nodes: str = ""
    condition: Callable[[Mapping[str, str]], bool] = lambda environ: True

    def are_set(self, environ: Mapping[str, str]) -> bool:
        return self.rank in environ and self.world_size in environ and self.condition(environ)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether `srun` started this process, or one of its ancestors."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _FIRST_RESERVED_STEP


def slurm_query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for Slurm's commands in which no variable adds an option to a question
    or to a cancel.

    `SQUEUE_PARTITION=low`, for example, would hide all jobs of other partitions.
    """
    return {name: text for name, text in environ.items() if not name.startswith(_SLURM_OPTIONS)}


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    return in_slurm_step(environ) and "SLURM_PTY_PORT" not in environ  # not a shell in `srun --pty`


_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)

# The first row whose variables are set counts. torchrun's variables come first, since our own
# agents set them. MPI comes before Slurm: under mpirun the ranks also inherit the SLURM_* variables
# of the daemon that started them.
TABLE = (
    RankVariables("spawn", *_TORCHRUN, condition=lambda environ: env.SPAWNED in environ),
    RankVariables("torchrun", *_TORCHRUN),
    RankVariables(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    RankVariables(
        "mvapich",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    RankVariables(
        "intelmpi",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        condition=lambda environ: any(name.startswith("I_MPI_") for name in environ),
    ),
    RankVariables(
        "mpich",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        condition=lambda environ: "MPI_LOCALRANKID" in environ,
    ),
    RankVariables(
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
        condition=_is_slurm_task,
    ),
    RankVariables(
        "slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_NNODES",
        condition=_is_slurm_task,
    ),
    RankVariables("pmix", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)

MPI = ("openmpi", "mvapich", "intelmpi", "mpich")  # what `mpirun` may be


MAX_HOSTS = 65_536  # more than Slurm itself allows; a list may come from a file of somebody else
_WORD = r"(?:[^,\[\]]|\[[^\[\]]+\])+"
_LIST = re.compile(rf"(?:{_WORD})?(?:,(?:{_WORD})?)*")


def expand(text: str) -> list[str]:
    """Return every host of a list, in its order: `a[1-2],b` gives a1, a2, b. Several brackets
    multiply.

    Raises UsageError if the list is malformed or too long, before it takes memory for it.
    """
    try:
        return _expand(text)
    except ValueError:
        shown = text if len(text) <= 100 else f"{text[:100]}..."
        raise UsageError(
            f"Invalid host list {shown!r}: use names and ranges such as gpu[01-04,7],big1, at most "
            f"{MAX_HOSTS:,} hosts."
        ) from None


def _expand(text: str) -> list[str]:
    if not _LIST.fullmatch(text):
        raise ValueError
    hosts: list[str] = []
    for word in filter(str.strip, re.findall(_WORD, text)):
        names = [""]
        for piece in re.findall(r"\[[^\]]+\]|[^\[]+", word.strip()):
            choices = _parse_ranges(piece[1:-1]) if piece.startswith("[") else [piece]
            if len(hosts) + len(names) * len(choices) > MAX_HOSTS:
                raise ValueError
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return hosts


def _parse_ranges(ranges: str) -> list[str]:
    """`01-03,7` stands for 01, 02, 03, 7: the first number's width is the width of its range."""
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= end - begin < MAX_HOSTS - len(found):
            raise ValueError
        found += [f"{number:0{len(first)}d}" for number in range(begin, end + 1)]
    return found
