"""What the nodes of each partition have, and how much of it is free."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from paceline.slurm.commands import SEPARATOR, call
from paceline.slurm.partitions import parse_gres

_FIELDS = ("Partition", "Available", "Time", "Nodes", "StateLong", "CPUsState", "Gres", "GresUsed")
_WIDTH = 512  # characters; sinfo cuts longer values
# not *: silent
_WORKING = re.compile(r"(idle|mixed|allocated|completing|reserved|planned)[-~#!%$@^+]*", re.ASCII)


@dataclass
class PartitionUse:
    """A partition: how much there is on nodes that work, and how much of it no job has."""

    name: str
    is_default: bool = False
    is_up: bool = True
    time_limit: str = ""  # as Slurm writes it
    nodes: int = 0  # also those that are down
    idle_nodes: int = 0
    cpus: int = 0
    free_cpus: int = 0
    gpus: dict[str, int] = field(default_factory=dict)  # by type; "" if untyped
    free_gpus: dict[str, int] = field(default_factory=dict)


def ask_node_use() -> str:
    """Return what `sinfo` says about all nodes. Equal nodes share a line."""
    form = ",".join(f"{name}:{_WIDTH}{SEPARATOR}" for name in _FIELDS)
    return call(["sinfo", "--all", "--noheader", "--exact", f"--Format={form}"]).stdout


def parse_node_use(text: str) -> list[PartitionUse]:
    """Parse what `ask_node_use` returns."""
    found: dict[str, PartitionUse] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(SEPARATOR)][: len(_FIELDS)]
        if len(values) == len(_FIELDS):
            name = values[0].rstrip("*")
            _add(found.setdefault(name, PartitionUse(name)), values)
    return list(found.values())


def _add(use: PartitionUse, values: list[str]) -> None:
    name, up, limit, count, state, cpus, gres, used = values
    use.is_default |= name.endswith("*")
    use.is_up, use.time_limit = up == "up", limit
    nodes = int(count) if count.isdigit() else 0
    use.nodes += nodes
    if _WORKING.fullmatch(state) is None:
        return
    use.idle_nodes += nodes if state.startswith("idle") else 0
    # allocated, idle, other, total, of all these nodes
    if match := re.fullmatch(r"(\d+)/(\d+)/(\d+)/(\d+)", cpus):
        use.cpus += int(match[4])
        use.free_cpus += int(match[2])
    taken = parse_gres(_plain(used))
    for kind, each in parse_gres(gres).items():
        use.gpus[kind] = use.gpus.get(kind, 0) + nodes * each
        use.free_gpus[kind] = use.free_gpus.get(kind, 0) + nodes * max(0, each - taken.get(kind, 0))


def _plain(used: str) -> str:
    """Drop which GPUs are in use: `gpu:a100:2(IDX:0,3)` -> `gpu:a100:2`, `gpu:(null):1(IDX:0)` ->
    `gpu:1`.
    """
    return re.sub(r"\([^)]*\)", "", used.replace(":(null)", ""))
