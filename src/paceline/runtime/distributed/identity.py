"""Who this process is among its peers: read once from the environment, by one table, into a frozen value.

No torch here, and nothing is ever written to the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.contract.rank_env import TABLE, RankVariables
from paceline.errors import UsageError


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


def read_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """The first row whose rank and world are both there; else a world of one."""
    environ = os.environ if environ is None else environ
    for row in TABLE:
        if row.are_set(environ):
            return _read(row, environ)
    return Identity()


def _read(row: RankVariables, environ: Mapping[str, str]) -> Identity:
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
