"""Who this process is among its peers: read once from the environment, by one table, into a frozen value.

No torch here, and nothing is ever written to the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import UsageError

SPAWNED = "PACELINE_SPAWNED"  # set by paceline.spawn in its children, besides torchrun's variables


@dataclass(frozen=True)
class Identity:
    """Rank and world, on this node and over all of them; `source` says who told."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1
    source: str = "single process"

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1


@dataclass(frozen=True)
class Row:
    """One way of being started. Empty names are not told by it, and are worked out from the rest."""

    source: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node: str = ""
    num_nodes: str = ""
    holds: Callable[[Mapping[str, str]], bool] = lambda environ: True


# The batch script's own step has SLURM_PROCID=0 and the job's SLURM_NTASKS, but only one process runs in it:
# `python train.py` typed there is a world of one, not rank 0 of a world that never forms. An interactive
# allocation (`salloc`) is such a step too. Their step numbers are reserved ones, or there is none.
_NOT_A_TASK = {"", "batch", "extern", "interactive", "4294967290", "4294967291", "4294967292"}


def _in_a_slurm_task(environ: Mapping[str, str]) -> bool:
    # srun alone sets SLURM_SRUN_COMM_HOST or the step's number of tasks; a shell inside `srun --pty` has both,
    # and is told apart by having a terminal of its own.
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step not in _NOT_A_TASK and "SLURM_PTY_PORT" not in environ


# In the order in which they are asked. MPI comes before Slurm: under mpirun the ranks also inherit the
# SLURM_* variables of the daemon that started them. torchrun's come first: all our own agents give them.
TABLE = (
    Row("spawn", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        holds=lambda environ: SPAWNED in environ),
    Row("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    Row("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Row("mvapich", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE"),
    Row("intelmpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        holds=lambda environ: any(name.startswith("I_MPI_") for name in environ)),
    Row("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        holds=lambda environ: "MPI_LOCALRANKID" in environ),
    Row("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID", "SLURM_STEP_NUM_NODES", holds=_in_a_slurm_task),
    Row("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE",
        "SLURM_NODEID", "SLURM_NNODES", holds=_in_a_slurm_task),
    Row("pmix", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)  # fmt: skip


def read_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """The first row whose rank and world are both there; else a world of one."""
    environ = os.environ if environ is None else environ
    for row in TABLE:
        if row.rank in environ and row.world_size in environ and row.holds(environ):
            return _read(row, environ)
    return Identity()


def _read(row: Row, environ: Mapping[str, str]) -> Identity:
    rank, world_size = _number(row.rank, environ), _number(row.world_size, environ)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"{row.rank}={rank} does not fit {row.world_size}={world_size}",
            hint="A rank lies between 0 and the world size less one: check what the agent sets.",
        )
    node = _number(row.node, environ) if row.node in environ else None
    local_world_size = _per_node(row.local_world_size, environ, node or 0)
    local_rank = _number(row.local_rank, environ) if row.local_rank in environ else None
    if local_world_size is None:
        # Somebody set rank and world by hand: one node, unless the local rank says otherwise.
        local_world_size = world_size if local_rank is None or local_rank == rank else 1
    if local_rank is None:
        local_rank = rank % local_world_size
    if node is None:
        node = (rank - local_rank) // local_world_size
    if row.num_nodes in environ:
        num_nodes = _number(row.num_nodes, environ)
    else:
        num_nodes = max(-(-world_size // local_world_size), node + 1)
    return Identity(rank, world_size, local_rank, local_world_size, node, num_nodes, row.source)


def _number(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UsageError(
            f"{name}={environ[name]!r} is not a whole number",
            hint="It is set by the agent; unset it to run alone.",
        ) from None


def _per_node(name: str, environ: Mapping[str, str], node: int) -> int | None:
    """A plain number, or Slurm's counts per node: `4(x2),3` means 4, 4 and 3."""
    text = environ.get(name, "")
    if not text:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(f"{name}={text!r} is not understood", hint="Expected a number, or 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]
