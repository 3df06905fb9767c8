"""Final weights in a file, and how much they differ from those of another run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

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
