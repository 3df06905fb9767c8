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
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError

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


@dataclass(frozen=True)
class Numbering:
    """Variables by which a starter of processes numbers them. A node agent's node is its own number unless told."""

    said_by: str
    index: str
    count: str
    local: str = ""
    node: str = ""
    styles: tuple[str, ...] = ()  # empty: all styles

    def applies(self, style: str, environ: Mapping[str, str]) -> bool:
        if self.styles and style not in self.styles:
            return False
        return self.index in environ and self.count in environ


def _slurm(count: str) -> Numbering:
    return Numbering("Slurm", index="SLURM_PROCID", count=count, local="SLURM_LOCALID", node="SLURM_NODEID")


# The first row that applies speaks. Under mpirun SLURM_PROCID and SLURM_NTASKS describe the daemon that mpirun
# started on each node, not the program: so MPI's own numbers come first, and only for the style that wants them.
NUMBERINGS = (
    Numbering(
        "OpenMPI", index="OMPI_COMM_WORLD_RANK", count="OMPI_COMM_WORLD_SIZE",
        local="OMPI_COMM_WORLD_LOCAL_RANK", styles=EITHER_STYLES,
    ),
    Numbering(
        "MVAPICH", index="MV2_COMM_WORLD_RANK", count="MV2_COMM_WORLD_SIZE",
        local="MV2_COMM_WORLD_LOCAL_RANK", styles=EITHER_STYLES,
    ),
    Numbering("MPICH (Hydra)", index="PMI_RANK", count="PMI_SIZE", local="MPI_LOCALRANKID", styles=EITHER_STYLES),
    _slurm("SLURM_STEP_NUM_TASKS"),
    _slurm("SLURM_NTASKS"),
)  # fmt: skip

VERDICT_WITHIN = 15.0  # seconds that a member which cannot go on waits for the head to end the run

# Steps that are no steps: the batch script, the allocation's interactive shell, the external one.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


def find_place(launch_spec: LaunchSpec, environ: Mapping[str, str]) -> Place:
    """This agent's place, or an error that says who said what."""
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if env.AGENT in environ:
        index, count = _index_and_count(environ[env.AGENT])
        return _placed(launch_spec, env.AGENT, index=index, count=count, host=host)
    for row in NUMBERINGS:
        if not row.applies(launch_spec.style, environ) or (
            row.said_by == "Slurm" and not _in_a_step(environ)
        ):
            continue
        return _placed(
            launch_spec, row.said_by, host=host,
            index=_number(environ, row.index), count=_number(environ, row.count),
            local=_number(environ, row.local) if row.local in environ else None,
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


def _in_a_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process: in a batch script SLURM_PROCID=0 stands alone and means nothing."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < FIRST_SPECIAL_STEP


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
    hosts = expand_hosts(listed)
    return hosts[node] if node < len(hosts) else ""


def expand_hosts(text: str) -> list[str]:
    """`a[1-3,07],b` as names, in order. Compute nodes may have no `scontrol` to ask (containers)."""
    hosts: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        names = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[]+", item):
            endings = _numbers(piece[1:-1]) if piece.startswith("[") else [piece]
            names = [name + ending for name in names for ending in endings]
        hosts.extend(names)
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers.extend(str(number).zfill(width) for number in range(int(first), int(last or first) + 1))
    return numbers
