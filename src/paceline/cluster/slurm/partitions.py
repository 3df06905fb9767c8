"""What the cluster has: partitions, their limits, and what their nodes are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.slurm.commands import SEPARATOR, call
from paceline.errors import ClusterError
from paceline.spec.quantities import parse_seconds

_FIELDS = ("%P", "%a", "%l", "%D", "%c", "%m", "%G", "%f", "%T", "%s")
_DEAD = ("down", "drain", "fail", "unk", "maint", "power")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    count: int
    cpus: int
    memory: int  # MiB
    gpus: dict[str, int]  # type ("" where it has none) -> how many on a node
    features: tuple[str, ...]
    state: str

    @property
    def usable(self) -> bool:
        return not self.state.startswith(_DEAD)

    @property
    def gpu_count(self) -> int:
        return sum(self.gpus.values())


@dataclass
class Partition:
    name: str
    is_default: bool = False
    is_up: bool = True
    max_time: int | None = None  # seconds; None means no limit
    max_nodes: int | None = None
    kinds: list[NodeKind] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def gpu_types(self) -> dict[str, int]:
        """Every GPU type, and the most of it that a node has."""
        found: dict[str, int] = {}
        for kind in self.kinds:
            for name, count in kind.gpus.items():
                found[name] = max(found.get(name, 0), count)
        return found

    def count_nodes(
        self, *, gpus: int = 0, gpu_type: str | None = None, cpus: int = 0, memory: int = 0
    ) -> int:
        """How many nodes have at least this much."""
        return sum(
            kind.count
            for kind in self.kinds
            if (kind.gpus.get(gpu_type, 0) if gpu_type else kind.gpu_count) >= gpus
            and kind.cpus >= cpus
            and kind.memory >= memory
        )


def query_partitions() -> list[Partition]:
    """Ask `sinfo` for every partition."""
    done = call(["sinfo", "--noheader", "--exact", f"--format={SEPARATOR.join(_FIELDS)}"])
    return parse_sinfo(done.stdout)


def find_partitions() -> list[Partition]:
    """The same, or nothing where nobody answers."""
    try:
        return query_partitions()
    except ClusterError:
        return []


def parse_sinfo(text: str) -> list[Partition]:
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(SEPARATOR)]
        if len(values) != len(_FIELDS):
            continue
        name, up, limit, count, cpus, memory, gres, features, state, size = values
        partition = found.setdefault(name.rstrip("*"), Partition(name.rstrip("*")))
        partition.is_default |= name.endswith("*")
        partition.is_up = up == "up"
        partition.max_time = _limit(limit)
        most = size.rpartition("-")[2]
        partition.max_nodes = int(most) if most.isdigit() else None
        partition.kinds.append(
            NodeKind(
                count=_number(count), cpus=_number(cpus), memory=_number(memory), gpus=parse_gres(gres),
                features=tuple(word for word in features.split(",") if word and word != "(null)"), state=state,
            )
        )  # fmt: skip
    return list(found.values())


def parse_gres(text: str) -> dict[str, int]:
    """`gpu:a100:4(S:0-1),gpu:2,lustre:1` -> {"a100": 4, "": 2}"""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([^:,()]+))??:([0-9]+)", text):
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
    """The partitions that a job may land in: those that it names, else the default one."""
    if names is None:
        return [each for each in partitions if each.is_default]
    wanted = names.split(",")
    return [each for each in partitions if each.name in wanted]


def fair_cpus(partitions: Iterable[Partition], *, gpus: int, gpu_type: str | None, nproc: int) -> int:
    """A node's cores, shared out evenly among its GPUs (among the ranks where there are none).

    The least over the nodes that would do, so that the job can land on any of them.
    """
    shares = []
    for partition in partitions:
        for kind in partition.kinds:
            there = kind.gpus.get(gpu_type, 0) if gpu_type else kind.gpu_count
            if there >= max(gpus, 1) and gpus:
                shares.append(kind.cpus // there)
            elif not gpus and kind.cpus >= nproc:
                shares.append(kind.cpus // nproc)
    # Without GPUs a rank takes what it needs to train beside others; a node is not ours because it is there.
    fair = min(shares, default=1)
    return max(1, fair if gpus else min(fair, 2))
