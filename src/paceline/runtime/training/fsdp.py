"""Shard a model over the ranks with FSDP2, in place: the script keeps the object that it made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class FSDPModel:
    """A model whose parameters FSDP2 has sharded over the ranks."""

    saw_forward = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def set_gradient_sync(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def reduce_missed_gradients(self) -> None:
        """Do nothing: FSDP2's hooks are on the modules themselves and miss no gradient."""

    def sync_buffers(self) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


def shard(
    model: nn.Module, *, device: torch.device, low_precision: torch.dtype | None, layers: Any, options: dict[str, Any]
) -> FSDPModel:
    """Shard a model's parameters over all ranks. `options` go to `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Each rank keeps a shard of its own initial values, so all ranks must start from the same model.
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    options.setdefault("mesh", init_device_mesh(device.type, (dist.get_world_size(),)))
    if low_precision is not None:
        options.setdefault("mp_policy", MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=torch.float32))
    # Inner blocks first: an outer one takes whatever parameters are left. A shared block appears once.
    for block in reversed(list(dict.fromkeys(fsdp_blocks(model, layers)))):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return FSDPModel(model)


def fsdp_blocks(model: nn.Module, layers: Any) -> Iterable[nn.Module]:
    """Return the modules that FSDP2 gathers one at a time: those of the given classes, or the items of ModuleLists."""
    if layers is not None:
        kinds = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        return [each for each in model.modules() if isinstance(each, kinds) and each is not model]
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    entries = [entry for each in lists for entry in each if not isinstance(entry, (nn.ModuleList, nn.ModuleDict))]
    return [entry for entry in entries if any(True for _ in entry.parameters())]


def replace_parameters(model: nn.Module) -> None:
    """Make the parameters new objects, as sharding does: with one rank, the same mistakes then show up."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fresh = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                module._parameters[name] = replaced.setdefault(id(parameter), fresh)
