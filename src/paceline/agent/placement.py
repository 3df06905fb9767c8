"""Where this agent stands among the agents of its run: read from the environment, once.

Agents come one per node, or one per rank (styles `srun` and `mpirun`). Who numbered them is looked up in
a table; what they say is then held against the order, and a contradiction is an error that names both sides.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.contract import env
from paceline.contract.hostlist import expand
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.rank_env import MPI, TABLE, RankVariables
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError, UsageError

RANK_STYLES = ("srun",)  # the scheduler starts one agent per rank
EITHER_STYLES = ("mpirun",)  # one agent per rank, or one per node (mpirun over torchrun)


@dataclass(frozen=True)
class Place:
    """A agent's place. The global rank of `local_ranks[i]` is `first_rank + i`."""

    index: int  # among the agents; 0 is the head
    count: int  # how many agents there are
    node: int
    nodes: int
    local_ranks: list[int]  # those that this agent starts
    first_rank: int
    local_world_size: int  # ranks on this node, whoever starts them
    host: str

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def ranks(self) -> list[int]:
        """The global ranks that this agent starts."""
        return [self.first_rank + position for position in range(len(self.local_ranks))]


class Absent(LaunchError):
    """Agents that did not join; `hosts` are their nodes, as far as they are known."""

    def __init__(self, message: str, *, hint: str = "", hosts: list[str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.hosts = hosts or []


class Interrupted(LaunchError):
    """Somebody wants it to end before it has begun."""


_NAMES = {
    "slurm": "Slurm", "openmpi": "OpenMPI", "mvapich": "MVAPICH", "intelmpi": "Intel MPI", "mpich": "MPICH",
}  # fmt: skip

VERDICT_WITHIN = 15.0  # seconds that a member which cannot go on waits for the head to end the run


def find_place(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> Place:
    """This agent's place, or an error that says who said what."""
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if env.AGENT in environ:
        index, count = _index_and_count(environ[env.AGENT])
        return _placed(launch_spec, env.AGENT, index=index, count=count, host=host)
    for row in TABLE:
        if not _counts(row, launch_spec.style) or not row.are_set(environ):
            continue
        return _placed(
            launch_spec, _NAMES[row.source], host=host,
            index=_number(environ, row.rank), count=_number(environ, row.world_size),
            local=_number(environ, row.local_rank) if row.local_rank in environ else None,
            node=_number(environ, row.node) if row.node in environ else None,
        )  # fmt: skip
    return _placed(
        launch_spec, "nobody (there is no scheduler's step around this process)", index=0, count=1, host=host
    )


def _placed(
    launch_spec: LaunchSpec,
    said_by: str,
    *,
    index: int,
    count: int,
    host: str,
    local: int | None = None,
    node: int | None = None,
) -> Place:
    if not 0 <= index < count:
        raise LaunchError(f"{said_by} numbers this agent {index} of {count}, which cannot be")
    per_rank = launch_spec.style in RANK_STYLES or (
        launch_spec.style in EITHER_STYLES and count != launch_spec.nodes
    )
    expected = launch_spec.world_size if per_rank else launch_spec.nodes
    if count != expected:
        what = (
            f"{launch_spec.nodes} nodes x {launch_spec.nproc} ranks"
            if per_rank
            else f"{launch_spec.nodes} nodes"
        )
        raise LaunchError(
            f"the run was ordered as {what}, so style {launch_spec.style} needs {expected} agents, "
            f"but {said_by} started {count} (this is number {index}, on {host})",
            hint=f"ask for as many {'tasks' if per_rank else 'nodes, with one task on each,'} "
            "as the run was ordered with",
        )
    if not per_rank:
        # The agents' own numbers name the nodes: with one task per node Slurm's NODEID says the same.
        node = index if node is None else node
        if node != index:
            raise LaunchError(
                f"{said_by} calls this agent number {index} but its node number {node}: there must be one task "
                f"per node for style {launch_spec.style}"
            )
        return Place(
            index,
            count,
            node,
            launch_spec.nodes,
            list(range(launch_spec.nproc)),
            node * launch_spec.nproc,
            launch_spec.nproc,
            host,
        )
    local = index % launch_spec.nproc if local is None else local
    if node is None:
        # MPI numbers no nodes; ranks that stand node after node number them.
        node, expected_local = divmod(index, launch_spec.nproc)
        if local != expected_local:
            raise LaunchError(
                f"{said_by} made rank {index} the local rank {local} of {host}, but with {launch_spec.nproc} ranks "
                f"per node it would be local rank {expected_local}",
                hint=f"let mpirun fill node after node: --map-by ppr:{launch_spec.nproc}:node",
            )
    if not (0 <= local < launch_spec.nproc and 0 <= node < launch_spec.nodes):
        raise LaunchError(
            f"the run was ordered as {launch_spec.nodes} nodes x {launch_spec.nproc} ranks, but {said_by} "
            f"made rank {index} the local rank {local} of node {node} ({host})",
            hint=f"ask for {launch_spec.nproc} tasks on every node (--ntasks-per-node={launch_spec.nproc})",
        )
    return Place(index, count, node, launch_spec.nodes, [local], index, launch_spec.nproc, host)


def _counts(row: RankVariables, style: str) -> bool:
    """Return whether a row numbers agents: MPI's do so only under mpirun, Slurm's always."""
    return row.source == "slurm" or (row.source in MPI and style in EITHER_STYLES)


def _index_and_count(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise LaunchError(f'{env.AGENT} is "{text}"; expected "index/count", such as "0/2"')
    return int(match[1]), int(match[2])


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdigit():
        raise LaunchError(f'{name} is "{text}"; expected a number')
    return int(text)


def job_start_folder(environ: Mapping[str, str]) -> JobStartFolder | None:
    """The folder that all agents of this job start share, if they were given one."""
    if env.RUN in environ and env.JOB_START in environ:
        return RunFolder(Path(environ[env.RUN])).job_start(environ[env.JOB_START])
    return None


def await_verdict(job_start: JobStartFolder, give_up: Callable[[], bool] = lambda: False) -> None:
    """What a member does before it exits with an error of its own: the head is to end the run in writing first."""
    until = time.monotonic() + VERDICT_WITHIN
    while time.monotonic() < until and not job_start.verdict.exists() and not give_up():
        time.sleep(0.2)


def host_of_node(node: int, environ: Mapping[str, str]) -> str:
    """The name of a node that has not spoken yet, as the scheduler lists it; empty where nobody can say."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        hosts = expand(listed)
    except UsageError:
        return ""
    return hosts[node] if node < len(hosts) else ""
