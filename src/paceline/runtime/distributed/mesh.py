"""The device mesh: which ranks hold copies of a model, which hold shards of it, and which work on
the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.distributed.process_group import ProcessGroups

# from the outermost to the innermost: neighbours share a tensor
DIMENSIONS = ("replicate", "shard", "tensor")
EXAMPLE = 'mesh={"replicate": 2, "shard": 4}'


class RankMesh:
    """The ranks as a grid of replicate x shard x tensor, and this rank's place among those that see
    different data.

    Ranks along "tensor" work on the same samples. Without a mesh, or with tensor=1, every rank has
    its own.
    """

    def __init__(self, identity: Identity, device: torch.device, group: ProcessGroups) -> None:
        self.sizes: dict[str, int] | None = None
        # torch's DeviceMesh with all three dimensions; None with a single rank
        self.device_mesh: Any = None
        self.data = identity  # this rank among the data-parallel ranks
        self._world = identity
        self.device = device
        self.group = group

    @property
    def tensor(self) -> int:
        """How many ranks work on the same samples."""
        return self.sizes["tensor"] if self.sizes else 1

    @property
    def fsdp_mesh(self) -> Any:
        """The part of the mesh that FSDP2 shards over: one dimension, or two if there are
        copies.
        """
        assert self.sizes is not None
        return self.device_mesh["shard" if self.sizes["replicate"] == 1 else ("replicate", "shard")]

    def set(self, requested: Mapping[str, int], *, in_use: bool = False) -> None:
        """Set the mesh: a collective. With `in_use`, data has been split between ranks, and must
        stay so.

        Raises UsageError if the sizes do not fit the world, or if there is another mesh already.
        """
        sizes = resolve_sizes(requested, self._world.world_size)
        if self.sizes is not None and sizes != self.sizes:
            raise UsageError(
                f"mesh is {describe(sizes)}, but the mesh of this run is {describe(self.sizes)}.",
                hint="A run has one mesh. Pass it to paceline.session, or to the first run.wrap.",
            )
        if self.sizes is not None:
            return
        if in_use and sizes["tensor"] > 1:
            raise UsageError(
                f"mesh is {describe(sizes)}, so ranks along tensor work on the same samples; but "
                "a loader, an "
                "evaluation or a resume before this run.wrap has already given each rank its own.",
                hint="Wrap the model first, or pass the mesh to paceline.session.",
            )
        self.sizes = sizes
        if self._world.world_size > 1:
            self._connect(sizes)

    def _connect(self, sizes: dict[str, int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        shape = tuple(sizes[name] for name in DIMENSIONS)
        self.device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=DIMENSIONS)
        tensor = sizes["tensor"]
        if tensor > 1:
            world = self._world
            self.data = replace(
                world, rank=world.rank // tensor, world_size=world.world_size // tensor
            )
            self.group.split_data(tensor)


def resolve_sizes(requested: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the size of each dimension. With a single rank, all are 1: there is nothing to share.

    Raises UsageError if a name or a size is invalid, or if the sizes do not multiply to the world
    size.
    """
    sizes = {name: requested.get(name, 1) for name in DIMENSIONS}
    open_names = [name for name, size in sizes.items() if size == -1]
    is_known = bool(requested) and set(requested) <= set(DIMENSIONS)
    if not is_known or min(sizes.values()) < -1 or 0 in sizes.values() or len(open_names) > 1:
        raise UsageError(
            f"mesh is {requested!r}, but must be sizes of {', '.join(DIMENSIONS)}.",
            hint=f"Write {EXAMPLE}. One of the sizes may be -1, for the rest.",
        )
    if world_size == 1:
        return dict.fromkeys(DIMENSIONS, 1)
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_names and world_size % known == 0:
        sizes[open_names[0]] = world_size // known
    elif known != world_size or open_names:
        given = " x ".join(f"{name}={size}" for name, size in requested.items())
        needs = f"a multiple of {known} ranks" if open_names else f"{known} ranks"
        raise UsageError(
            f"The mesh {given} needs {needs}, but the world has {world_size}.",
            hint="The sizes multiply to the number of ranks. One of them may be -1, for what is "
            "left.",
        )
    return sizes


def describe(sizes: Mapping[str, int]) -> str:
    """Return the sizes as text for messages."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())
