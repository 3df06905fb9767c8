"""An agent's placement: its index among the agents, its node, and the ranks it starts.

There is one agent per node, or one per rank (styles `srun` and `mpirun`). The environment says
which one this is. What it says is checked against the launch spec; a contradiction is an error that
names both.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.launcher_variables import MPI, TABLE, RankVariables, expand, in_slurm_step
from paceline.errors import LaunchError, UsageError

RANK_STYLES = ("srun",)  # the scheduler starts one agent per rank
EITHER_STYLES = ("mpirun",)  # one agent per rank, or one per node (mpirun over torchrun)

_NAMES = {
    "slurm": "Slurm",
    "openmpi": "OpenMPI",
    "mvapich": "MVAPICH",
    "intelmpi": "Intel MPI",
    "mpich": "MPICH",
}


@dataclass(frozen=True)
class Placement:
    """Where an agent runs. The global rank of `local_ranks[i]` is `first_rank + i`."""

    index: int  # among the agents; 0 is the head agent
    count: int  # number of agents
    node: int
    nodes: int
    local_ranks: list[int]  # those that this agent starts
    first_rank: int
    local_world_size: int  # ranks on this node, whichever agent starts them
    host: str

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def ranks(self) -> list[int]:
        """The global ranks that this agent starts."""
        return [self.first_rank + position for position in range(len(self.local_ranks))]


@dataclass(frozen=True)
class _Numbers:
    """How a launcher numbers this agent."""

    source: str
    index: int
    count: int
    host: str
    local_rank: int | None = None
    node: int | None = None


def find_placement(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> Placement:
    """Return this agent's placement. If the environment contradicts the launch spec, the error
    names both.
    """
    numbers = _read_numbers(launch_spec.style, environ)
    per_rank = launch_spec.style in RANK_STYLES or (
        launch_spec.style in EITHER_STYLES and numbers.count != launch_spec.nodes
    )
    expected = launch_spec.world_size if per_rank else launch_spec.nodes
    if numbers.count != expected:
        shape = f"{launch_spec.nodes} nodes" + (f" x {launch_spec.nproc} ranks" if per_rank else "")
        raise LaunchError(
            f"The run has {shape}, so style {launch_spec.style} needs {expected} agents, but "
            "there are "
            f"{numbers.count} according to {numbers.source} (this is index {numbers.index}, on "
            f"{numbers.host}).",
            hint=f"Start {expected} tasks."
            if per_rank
            else f"Start one task on each of {expected} nodes.",
        )
    nodes, nproc = launch_spec.nodes, launch_spec.nproc
    per_node = nproc if per_rank else 1
    expected_node, expected_local_rank = divmod(numbers.index, per_node)
    node = expected_node if numbers.node is None else numbers.node
    local_rank = expected_local_rank
    if per_rank and numbers.local_rank is not None:
        local_rank = numbers.local_rank
    in_order = (node, local_rank) == (expected_node, expected_local_rank)
    # Slurm may spread its ranks as it likes. MPI does not number nodes: only if the ranks fill node
    # after node, the rank gives the node.
    may_be_spread = per_rank and numbers.node is not None
    in_range = 0 <= local_rank < nproc and 0 <= node < nodes
    if not in_range or not (in_order or may_be_spread):
        raise LaunchError(
            f"The run has {nodes} nodes x {nproc} ranks, so style {launch_spec.style} needs "
            f"{per_node} agents per node, but {numbers.source} made agent {numbers.index} local "
            f"rank {local_rank} of node {node} ({numbers.host}).",
            hint=f"Fill node after node: --ntasks-per-node={per_node}, or with mpirun --map-by "
            f"ppr:{per_node}:node.",
        )
    return Placement(
        numbers.index,
        numbers.count,
        node,
        nodes,
        [local_rank] if per_rank else list(range(nproc)),
        numbers.index if per_rank else node * nproc,
        nproc,
        numbers.host,
    )


def _read_numbers(style: str, environ: Mapping[str, str]) -> _Numbers:
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if env.AGENT in environ:
        index, count = map(int, environ[env.AGENT].split("/"))
        return _Numbers(env.AGENT, index, count, host)
    for row in TABLE:
        if _numbers_agents(row, style, environ):
            return _Numbers(
                _NAMES[row.source],
                int(environ[row.rank]),
                int(environ[row.world_size]),
                host,
                local_rank=int(environ[row.local_rank]) if row.local_rank in environ else None,
                node=int(environ[row.node]) if row.node in environ else None,
            )
    return _Numbers("the environment (no scheduler step)", 0, 1, host)


def _numbers_agents(row: RankVariables, style: str, environ: Mapping[str, str]) -> bool:
    """Return whether a row numbers agents: Slurm's in every step, MPI's only under mpirun."""
    if row.rank not in environ or row.world_size not in environ:
        return False
    if row.source == "slurm":
        # a job submitted from `srun --pty` inherits its SLURM_PTY_PORT
        return in_slurm_step(environ)
    # An older Hydra sets no MPI_LOCALRANKID. Ranks need it to tell mpirun from srun; here the style
    # does.
    return (
        style in EITHER_STYLES
        and row.source in MPI
        and (row.source == "mpich" or row.condition(environ))
    )


def node_name(node: int, environ: Mapping[str, str]) -> str:
    """Return the name of a node in Slurm's list; empty if there is none. For nodes that have not
    joined.
    """
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        hosts = expand(listed)
    except UsageError:
        return ""
    return hosts[node] if node < len(hosts) else ""
