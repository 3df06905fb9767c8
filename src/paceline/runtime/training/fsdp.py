"""Shard a model over the ranks with FSDP2, in place: the script keeps the object that it made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import UsageError
from paceline.runtime.checkpoint.state_tree import digest_state
from paceline.runtime.data.transfer import map_tensors
from paceline.runtime.distributed import collectives
from paceline.runtime.distributed.mesh import RankMesh, describe


class FSDPModel:
    """A model whose parameters FSDP2 has sharded over the ranks."""

    def __init__(self, model: nn.Module, mesh: RankMesh) -> None:
        self.model = model
        self._mesh = mesh

    def set_gradient_sync(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def sync_buffers(self) -> None:
        for buffer in self.model.buffers():
            if is_sharded(buffer):  # each rank along "tensor" has a part of its own
                group = self._mesh.group.data.main
                dist.broadcast(local_part(buffer), src=dist.get_global_rank(group, 0), group=group)
            else:
                dist.broadcast(buffer, src=0)


def check_parallelize(
    model: nn.Module, mesh: RankMesh, parallelize: Callable[[Any, Any], Any] | None, *, mode: str
) -> None:
    """Raise UsageError if a model cannot be split between tensor-parallel ranks as requested."""
    if parallelize is not None and (mode != "fsdp" or mesh.sizes is None):
        raise UsageError(
            "run.wrap(..., parallelize=...) needs mode='fsdp' and a mesh with tensor-parallel "
            "ranks.",
            hint='Use run.wrap(model, mesh={"shard": -1, "tensor": 2}, parallelize=...).',
        )
    if parallelize is None and mesh.tensor > 1:
        raise UsageError(
            f"The mesh is {describe(mesh.sizes or {})}, but nothing splits this model between "
            "ranks along tensor.",
            hint="Pass parallelize=f, where f(model, mesh) calls parallelize_module. To keep the "
            "whole model on every "
            "rank, use mode='ddp'.",
        )
    split = next(
        (name for name, parameter in model.named_parameters() if is_sharded(parameter)), None
    )
    if split is not None:
        raise UsageError(
            f"{split} is already a DTensor, so run.wrap cannot give all ranks the same values.",
            hint="Call parallelize_module in the function that you pass as parallelize.",
        )


def shard(
    model: nn.Module,
    *,
    mesh: RankMesh,
    layers: Any,
    parallelize: Callable[[Any, Any], Any] | None,
    options: dict[str, Any],
) -> FSDPModel:
    """Split a model between tensor-parallel ranks, then shard it over the others. `options` go to
    `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    if mesh.sizes is None:
        mesh.set({"shard": -1})
    # Each rank keeps a shard of its own initial values, so all ranks must start from the same
    # model.
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(mesh.device_mesh.device_type)
            dist.broadcast(tensor.data, src=0)
    if parallelize is not None and mesh.tensor > 1:
        split = parallelize(model, mesh.device_mesh["tensor"])
        if split is not None and split is not model:
            raise UsageError(
                "The function passed as parallelize returned another model.",
                hint="Change the model in place, as parallelize_module does.",
            )
    # Inner blocks first: an outer one takes whatever parameters are left. A shared block appears
    # once.
    for block in reversed(list(dict.fromkeys(fsdp_blocks(model, layers)))):
        fully_shard(block, mesh=mesh.fsdp_mesh, **options)
    fully_shard(model, mesh=mesh.fsdp_mesh, **options)
    return FSDPModel(model, mesh)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor."""
    return hasattr(tensor, "device_mesh")


def fsdp_blocks(model: nn.Module, layers: Any) -> Iterable[nn.Module]:
    """Return the modules that FSDP2 gathers one at a time: those of the given classes, or the
    items of ModuleLists.
    """
    if layers is not None:
        kinds = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        return [each for each in model.modules() if isinstance(each, kinds) and each is not model]
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    entries = [
        entry
        for each in lists
        for entry in each
        if not isinstance(entry, (nn.ModuleList, nn.ModuleDict))
    ]
    return [entry for entry in entries if any(True for _ in entry.parameters())]


def replace_parameters(model: nn.Module) -> None:
    """Make the parameters new objects, as sharding does: with one rank, the same mistakes then
    show up.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fresh = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                module._parameters[name] = replaced.setdefault(id(parameter), fresh)


def check_batch(batch: Any, mesh: RankMesh, device: torch.device) -> None:
    """Compare a batch between ranks along "tensor". A collective.

    Raises UsageError on all ranks if two of them got different tensors.
    """
    tensors: list[torch.Tensor] = []
    map_tensors(batch, tensors.append)
    digests = [
        int(each)
        for each in collectives.gather(torch.tensor(digest_state([], tensors)), mesh.group, device)
    ]
    for rank, digest in enumerate(digests):
        first = rank // mesh.tensor * mesh.tensor
        if digest != digests[first]:
            raise UsageError(
                f"Ranks {first} and {rank} are tensor-parallel, so they need the same batches, "
                "but got different ones.",
                hint="Use run.loader, or split the data by run.dp_rank and run.dp_size, and "
                "shuffle it with a seed.",
            )


# -- gradients
# -----------------------------------------------------------------------------------------


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], mesh: RankMesh) -> torch.Tensor:
    """Return the norm of all gradients, the same on all ranks. A collective, with one reduction.

    Torch's own function takes gradients of a single mesh. With tensor parallelism there are two:
    layers that are not split are sharded over fewer ranks.
    """
    world_size = dist.get_world_size()
    parts: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            parts.setdefault(_count_shards(parameter.grad), []).append(local_part(parameter.grad))
    total = torch.zeros((), device=next((each[0].device for each in parts.values()), None))
    for shards, gradients in parts.items():
        norm = nn.utils.get_total_norm(gradients)
        # As many ranks hold each element, and each of them adds its square.
        total = total + norm.to(torch.promote_types(norm.dtype, torch.float32)) ** 2 * (
            shards / world_size
        )
    # Offloaded gradients are on the CPU, where the group of the GPUs does not work.
    dist.all_reduce(
        total,
        group=mesh.group.main if total.device.type == mesh.device.type else mesh.group.control,
    )
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], max_norm: float, mesh: RankMesh) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`, and return what it was."""
    norm = gradient_norm(parameters, mesh)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [
        local_part(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, scale)
    return norm


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor: all of it, unless it is a DTensor."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def _count_shards(tensor: Any) -> int:
    """Return how many different parts the ranks hold of a tensor."""
    if not is_sharded(tensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(
        mesh.size(number) for number, each in enumerate(tensor.placements) if hasattr(each, "dim")
    )
