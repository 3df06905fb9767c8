"""Final weights in a file, and the largest difference from those of another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def full_tensors(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return whole tensors. All ranks call this: shards of FSDP2 are gathered."""
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in tensors]


def write(tensors: Sequence[torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save([each.detach().cpu() for each in tensors], path)


def compare(tensors: Sequence[torch.Tensor], path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the largest difference, relative to weights above 1, and the parameter that has it."""
    reference = torch.load(path, map_location="cpu", weights_only=True)
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
    return {"difference": largest, "parameter": where}
