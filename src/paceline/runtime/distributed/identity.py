"""Rank and world size of this process, read from the environment. Needs no torch, and writes no
variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.contract.launcher_variables import TABLE, RankVariables
from paceline.errors import UsageError


@dataclass(frozen=True)
class Identity:
    """The position of this process among all ranks."""

    rank: int = 0
    """From 0 to `world_size` - 1."""
    world_size: int = 1
    """The number of ranks."""
    local_rank: int = 0
    """The rank on this node, from 0."""
    local_world_size: int = 1
    """The number of ranks on this node."""
    node: int = 0
    """The index of this node."""
    num_nodes: int = 1
    source: str = "single process"
    """What started the ranks: "torchrun", "slurm", "openmpi" and so on."""

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.world_size > 1


def read_identity(environ: Mapping[str, str] | None = None) -> Identity:
    """Return rank and world size of this process, as set by torchrun, Slurm, an MPI or
    `paceline.spawn`.

    Without any of them it is rank 0 of 1. Does not import torch.

    Args:
        environ: The environment to read; `os.environ` by default.

    Raises:
        UsageError: A variable is not a number, or the rank does not fit the world size.
    """
    environ = os.environ if environ is None else environ
    for row in TABLE:
        if row.are_set(environ):
            return _read(row, environ)
    return Identity()


def _read(row: RankVariables, environ: Mapping[str, str]) -> Identity:
    rank, world_size = _number(row.rank, environ), _number(row.world_size, environ)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"{row.rank}={rank} does not fit {row.world_size}={world_size}: ranks go from 0 to "
            f"{world_size - 1}.",
            hint="Check what sets these variables, or unset both to run a single process.",
        )
    node = _number(row.node, environ) if row.node in environ else None
    local_world_size = _per_node(row.local_world_size, environ, node or 0)
    local_rank = _number(row.local_rank, environ) if row.local_rank in environ else None
    if local_world_size is None:
        # Rank and world size were set by hand: assume one node, unless the local rank contradicts
        # that.
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
            f"{name}={environ[name]!r} is not a whole number.",
            hint="Check what sets it, or unset it to run a single process.",
        ) from None


def _per_node(name: str, environ: Mapping[str, str], node: int) -> int | None:
    """Return the count of a node, from a number or from Slurm's list: `4(x2),3` means 4, 4 and
    3.
    """
    text = environ.get(name, "")
    if not text:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(
                f"{name}={text!r} is not a number, or a list such as 4(x2),3.",
                hint="Check what sets it.",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]
