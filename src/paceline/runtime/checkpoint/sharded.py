"""State sharded over a device mesh (FSDP2, DTensor).

Each rank writes its own parts of the tensors into its share, under names that say where they are.
To load, each rank copies what its own parts overlap with, whichever ranks wrote it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.runtime.checkpoint.safetensors import TORCH_DTYPES


def dtensor_class() -> Any:
    """Return the DTensor class if it has been imported. Otherwise no DTensor exists, and importing
    is slow.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def own_part(name: str, tensor: Any) -> dict[str, torch.Tensor]:
    """Return this rank's part of a tensor under the name that it is saved by; nothing if it is
    empty, or a copy of another rank's.
    """
    local, offsets = local_part(tensor)
    place = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    is_copy = any(each.is_replicate() and number for each, number in place)
    # no other name begins like this: those of objects have no slash
    return {} if is_copy or not local.numel() else {f"@{','.join(map(str, offsets))}/{name}": local}


def parse_part(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the tensor that a part is of, and where the part begins in each of its dimensions;
    None for a tensor that is no part.
    """
    match = re.fullmatch(r"@([\d,]{0,999})/(.*)", name, re.DOTALL)
    return (match[2], tuple(map(int, re.findall(r"\d+", match[1])))) if match else None


def local_part(tensor: Any) -> tuple[torch.Tensor, Sequence[int]]:
    """Return this rank's part of a tensor, and where it begins in each dimension."""
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(tensor, dtensor):
        return tensor.detach(), [0] * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local().detach(), offsets


def find_overlap(
    saved: Sequence[int], saved_sizes: Sequence[int], own: Sequence[int], own_sizes: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Return for each dimension where the overlap begins in a saved part and in an own one, and its
    length. None if there is no overlap.
    """
    region = []
    for first, size, begin, extent in zip(saved, saved_sizes, own, own_sizes, strict=True):
        low, high = max(first, begin), min(first + size, begin + extent)
        if low >= high:
            return None
        region.append((low - first, low - begin, high - low))
    return region


def make_target(entry: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    """Return an empty tensor for a saved sharded one, with the placements of `like` (itself or its
    parameter).
    """
    dtype, shape = TORCH_DTYPES[entry["dtype"]], list(entry["shape"])
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(like, dtensor):
        return torch.empty(shape, dtype=dtype)
    if list(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype)
    # Optimizer state whose shape differs from its parameter: the same mesh, and the saved
    # placements if they fit.
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = like.device_mesh
    saved = [
        Shard(int(code[1:])) if code[0] == "S" else Replicate() for code in entry["placements"]
    ]
    placements = saved if len(saved) == mesh.ndim else [Replicate()] * mesh.ndim
    return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)


def shard_like(tensor: torch.Tensor, like: torch.Tensor | None) -> Any:
    """Return a tensor that every rank holds in full, sharded as `like` is if it is. Each rank takes
    its part, without communication.
    """
    dtensor = dtensor_class()
    if dtensor is None or not isinstance(like, dtensor) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import Replicate

    mesh = like.device_mesh
    local = tensor.to(mesh.device_type)
    replicated = dtensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)
