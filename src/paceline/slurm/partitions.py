"""The cluster's partitions: their limits, their nodes, and how much of these is free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import ClusterError
from paceline.slurm.commands import SEPARATOR, call
from paceline.spec.quantities import parse_seconds

_FIELDS = (
    *("Partition", "Available", "Time", "Nodes", "CPUs", "Memory"),
    *("Gres", "GresUsed", "CPUsState", "StateLong", "Size"),
)
_WIDTH = 512  # characters; sinfo cuts longer values
_DEAD = ("down", "drain", "fail", "unk", "maint", "power", "reboot", "future", "inval")


@dataclass(frozen=True)
class NodeKind:
    """A group of identical nodes in a partition."""

    count: int
    cpus: int
    memory: int  # MiB
    gpus: dict[str, int]  # GPU type ("" if untyped) -> number per node
    state: str
    free_gpus: dict[str, int] = field(default_factory=dict)  # the same, of those that no job has
    free_cpus: int = 0  # of all these nodes

    @property
    def usable(self) -> bool:
        # "*": it does not respond
        return not self.state.startswith(_DEAD) and not self.state.endswith("*")

    @property
    def gpu_count(self) -> int:
        return sum(self.gpus.values())


@dataclass
class Partition:
    name: str
    is_default: bool = False
    is_up: bool = True
    max_time: int | None = None  # seconds, or None for no limit
    max_nodes: int | None = None
    kinds: list[NodeKind] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def usable_nodes(self) -> int:
        return sum(kind.count for kind in self.kinds if kind.usable)

    @property
    def gpu_types(self) -> dict[str, int]:
        """Each GPU type, with the largest number on any one node."""
        found: dict[str, int] = {}
        for kind in self.kinds:
            for name, count in kind.gpus.items():
                found[name] = max(found.get(name, 0), count)
        return found

    def count_nodes(
        self, *, gpus: int = 0, gpu_type: str | None = None, cpus: int = 0, memory: int = 0
    ) -> int:
        """Count the nodes that have at least this much."""
        return sum(
            kind.count
            for kind in self.kinds
            if (kind.gpus.get(gpu_type, 0) if gpu_type else kind.gpu_count) >= gpus
            and kind.cpus >= cpus
            and kind.memory >= memory
        )


def query_partitions() -> list[Partition]:
    """Query `sinfo` for all partitions."""
    form = ",".join(f"{name}:{_WIDTH}{SEPARATOR}" for name in _FIELDS)
    return parse_sinfo(call(["sinfo", "--all", "--noheader", "--exact", f"--Format={form}"]).stdout)


def find_partitions() -> list[Partition]:
    """Return all partitions, or an empty list if Slurm is missing or does not respond."""
    try:
        return query_partitions()
    except ClusterError:
        return []


def parse_sinfo(text: str) -> list[Partition]:
    """Parse the output of `sinfo` with the fields of `_FIELDS`."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(SEPARATOR)][: len(_FIELDS)]
        if len(values) != len(_FIELDS):
            continue
        name, up, limit, count, cpus, memory, gres, used, cpus_state, state, size = values
        partition = found.setdefault(name.rstrip("*"), Partition(name.rstrip("*")))
        partition.is_default |= name.endswith("*")
        partition.is_up = up == "up"
        partition.max_time = _limit(limit)
        max_nodes = size.rpartition("-")[2]
        partition.max_nodes = int(max_nodes) if max_nodes.isdigit() else None
        gpus, taken = parse_gres(gres), parse_gres(used)
        free = {kind: max(0, each - taken.get(kind, 0)) for kind, each in gpus.items()}
        _, idle, *_ = [*cpus_state.split("/"), "", ""]  # allocated, idle, other, total
        kind = NodeKind(_number(count), _number(cpus), _number(memory), gpus, state)
        partition.kinds.append(replace(kind, free_gpus=free, free_cpus=_number(idle)))
    return list(found.values())


def parse_gres(text: str) -> dict[str, int]:
    """Parse the GPUs of a Gres field: `gpu:a100:4(S:0-1),gpu:2,lustre:1` -> `{"a100": 4, "":
    2}`. Which of them are in use, in brackets, does not count.
    """
    found: dict[str, int] = {}
    plain = re.sub(r"\([^)]*\)", "", text.replace(":(null)", ""))
    for kind, count in re.findall(r"(?:^|,)gpu(?::([^:,]+))??:([0-9]+)", plain):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _number(text: str) -> int:
    match = re.match(r"[0-9]+", text)
    return int(match[0]) if match else 0


def _limit(text: str) -> int | None:
    try:
        return parse_seconds(text)
    except ValueError:
        return None


def select_partitions(partitions: Sequence[Partition], names: str | None) -> list[Partition]:
    """Return the partitions a job may run in: those it names, or the default partition."""
    if names is None:
        return [partition for partition in partitions if partition.is_default]
    return [partition for partition in partitions if partition.name in names.split(",")]


def fair_cpus(
    partitions: Iterable[Partition], *, gpus: int, gpu_type: str | None, nproc: int
) -> int:
    """Return a node's cores divided by its GPUs, or by the ranks if the job uses no GPUs.

    This is the minimum over all suitable nodes, so that the job can run on any of them.
    """
    shares = []
    for partition in partitions:
        for kind in partition.kinds:
            available = kind.gpus.get(gpu_type, 0) if gpu_type else kind.gpu_count
            if available >= max(gpus, 1) and gpus:
                shares.append(kind.cpus // available)
            elif not gpus and kind.cpus >= nproc:
                shares.append(kind.cpus // nproc)
    # A CPU-only rank takes at most two cores: a job should not claim a whole node just because it
    # is free.
    fair = min(shares, default=1)
    return max(1, fair if gpus else min(fair, 2))
