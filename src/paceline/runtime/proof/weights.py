"""Weights and gradients in short forms, final weights in a file, and how much they differ from
those of another run.
"""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

PROJECTION_SIZE = 2**20  # elements of the fixed vector on which gradients are projected
# of each weight in each step, in the last place, of which about the square root of the steps
# remains
ROUNDINGS = 4.0


def full_tensors(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return whole tensors. All ranks call this: shards of FSDP2 are gathered."""
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]


def write(tensors: Sequence[torch.Tensor], path: Path, *, moved: float) -> None:
    """Write weights, and how far they have moved since the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"tensors": [each.detach().cpu() for each in tensors], "moved": moved}, path)


def measure_distance(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None]
) -> float:
    """Return the norm of all differences. Tensors without another one do not count."""
    pairs = [
        (one.detach().cpu(), other)
        for one, other in zip(tensors, others, strict=True)
        if other is not None
    ]
    return math.sqrt(
        math.fsum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    )


def compare(
    tensors: Sequence[torch.Tensor], path: Path, names: Sequence[str], *, steps: int
) -> dict[str, Any]:
    """Return the largest difference, relative to weights above 1, the parameter that has it, and
    the share.

    The share is the distance between the two runs, beyond rounding, as a part of the way from the
    start: weights that hardly move stay close to each other, whatever the training does.
    """
    file = torch.load(path, map_location="cpu", weights_only=True)
    reference, moved = file["tensors"], float(file["moved"])
    if [each.shape for each in reference] != [each.shape for each in tensors]:
        return {"error": "the models have different parameters"}
    largest, where = 0.0, ""
    for name, tensor, other in zip(names, tensors, reference, strict=True):
        if not tensor.numel():
            continue
        distance = (tensor.detach().cpu().double() - other.double()).abs()
        found = float((distance / other.double().abs().clamp(min=1.0)).max())
        if not found <= largest:  # NaN is the largest of all
            largest, where = found, name
    beyond = max(0.0, measure_distance(tensors, reference) - _rounding(reference, steps))
    share = 0.0 if beyond == 0 else min(beyond / moved, 1e9) if moved else 1e9
    return {"difference": largest, "parameter": where, "share": share}


def _rounding(tensors: Sequence[torch.Tensor], steps: int) -> float:
    """Return how far rounding alone may take weights of this size."""
    squares = [
        (torch.finfo(each.dtype).eps * float(each.double().norm())) ** 2
        for each in tensors
        if each.is_floating_point()
    ]
    return ROUNDINGS * math.sqrt(max(1, steps) * math.fsum(squares))


def weights_digest(tensors: Sequence[torch.Tensor]) -> int:
    digest = 0
    for each in tensors:
        values = each.detach().reshape(-1).cpu()
        digest = zlib.crc32(
            values.view(torch.uint8).numpy().tobytes() if values.numel() else b"", digest
        )
    return digest


def gradient_summary(gradients: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    """Return a projection and the norm of each gradient. Projections are linear: a factor shows in
    all of them.
    """
    if not gradients:
        return []
    size = min(PROJECTION_SIZE, max(each.numel() for each in gradients))
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for each in gradients:
        flat = (each.to_dense() if each.is_sparse else each).detach().reshape(-1)
        own = vector.to(flat.device)
        parts = [part.double() for part in torch.split(flat, PROJECTION_SIZE)]
        projection = sum(float(part @ own[: len(part)]) for part in parts)
        found.append((projection, sum(float(part.square().sum()) for part in parts) ** 0.5))
    return found


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
