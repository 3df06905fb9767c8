"""Weights and gradients in short forms, final weights in a file, and how much they differ from
those of another run.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

PROJECTION_SIZE = 2**20  # elements of the fixed vector on which gradients are projected


def full_tensors(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return whole tensors. All ranks call this: shards of FSDP2 are gathered."""
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]


def compare(
    tensors: Sequence[torch.Tensor], path: Path, names: Sequence[str], *, noise: Collection[str]
) -> dict[str, Any]:
    """Return the largest difference, relative to weights above 1, and the parameter that has it.

    Parameters that get only `noise` as gradients may go anywhere.
    """
    reference = torch.load(path, map_location="cpu", weights_only=True)
    if [each.shape for each in reference] != [each.shape for each in tensors]:
        return {"error": "the models have different parameters"}
    largest, where = 0.0, ""
    for name, tensor, other in zip(names, tensors, reference, strict=True):
        if name in noise or not tensor.numel():
            continue
        distance = (tensor.detach().cpu().double() - other.double()).abs()
        found = float((distance / other.double().abs().clamp(min=1.0)).max())
        if not found <= largest:  # NaN is the largest of all
            largest, where = found, name
    return {"difference": largest, "parameter": where}


def weights_digest(tensors: Sequence[torch.Tensor]) -> int:
    digest = 0
    for each in tensors:
        if each.numel():
            values = each.detach().reshape(-1).cpu().view(torch.uint8)
            digest = zlib.crc32(values.numpy().tobytes(), digest)
    return digest


def gradient_norms(gradients: Sequence[torch.Tensor]) -> list[float]:
    return [float(each.detach().double().norm()) for each in map(_dense, gradients)]


def project(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Return a projection of each gradient. It is linear, so a factor shows in all of them."""
    size = min(PROJECTION_SIZE, max(each.numel() for each in gradients))
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for each in map(_dense, gradients):
        own = vector.to(each.device)
        parts = torch.split(each.detach().reshape(-1), PROJECTION_SIZE)
        found.append(sum(float(part.double() @ own[: len(part)]) for part in parts))
    return found


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def digest_modules() -> dict[str, list[int]]:
    """Return digests of the parameters and buffers of modules that are no part of another one, by
    what they are.

    Modules of one kind have one list, in the order of the digests: nothing else tells them apart.
    No rank waits for another one here: of a tensor that is sharded, this rank's part counts.
    """
    gc.collect()
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {id(child) for each in every for child in each.__dict__.get("_modules", {}).values()}
    found: dict[str, list[int]] = {}
    for module in every:
        if id(module) not in parts and "_modules" in module.__dict__:
            named = list(_tensors(module))
            if named:
                shape = repr([(name, tuple(tensor.shape)) for name, tensor in named])
                kind = f"{type(module).__name__} {zlib.crc32(shape.encode()):08x}"
                found.setdefault(kind, []).append(weights_digest([tensor for _, tensor in named]))
    return {kind: sorted(digests) for kind, digests in found.items()}


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        tensor: Any = value.to_local() if hasattr(value, "to_local") else value
        is_plain = (
            tensor.layout is torch.strided and not tensor.is_quantized and not is_lazy(tensor)
        )
        if is_plain and tensor.device.type != "meta":
            yield name, tensor
