"""Sums, means and gathered values over all ranks, of tensors, numbers and objects."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import default_restore_location

from paceline.errors import UsageError
from paceline.runtime.distributed.process_group import ProcessGroups

# What a rank adds to a sum: a number, or a tensor of this device, dtype and shape.
Addend = float | tuple[str, torch.dtype, tuple[int, ...]]


def sum_over_ranks(
    value: Any, group: ProcessGroups, device: torch.device, *, what: str = "run.sum"
) -> Any:
    """Return the sum of a tensor, on its own device, or of a number over all ranks.

    Ranks first tell each other what they have: one may still have the number 0 where others have a
    tensor.
    """
    total = _widen(value)
    if group.main is None:
        return total
    own: Addend = total
    if isinstance(total, torch.Tensor):
        own = total.device.type, total.dtype, tuple(total.shape)
    calls = _exchange((what, own), group)
    kind = _check_calls(calls)
    if kind is None:
        return sum(number for _, number in calls)
    place, dtype, shape = kind
    on_main = place == device.type
    if not isinstance(total, torch.Tensor):
        total = torch.zeros(shape, dtype=dtype, device=device if on_main else place)
    dist.all_reduce(total, group=group.main if on_main else group.control)
    return total


def mean_over_ranks(value: Any, weight: Any, group: ProcessGroups, device: torch.device) -> Any:
    """Return the mean over ranks of a tensor or a number, of which each rank has `weight`, or 1 if
    that is None; NaN if nobody has any.

    What has no weight counts nothing, even if it is NaN: the mean over no samples is.
    """
    if weight is None:
        total = sum_over_ranks(value, group, device, what="run.mean without a weight")
        return total / (1 if group.main is None else dist.get_world_size(group.main))
    share = _widen(value)
    if isinstance(share, torch.Tensor) and not share.is_floating_point():
        share = share.double()
    if isinstance(weight, torch.Tensor):
        share = torch.where(weight == 0, 0.0, share * weight)
    else:
        share = share * weight if weight else share * 0 if _is_finite(share) else 0
    total = sum_over_ranks(share, group, device, what="run.mean with a weight")
    weights = sum_over_ranks(weight, group, device, what="the weights of run.mean")
    if isinstance(weights, torch.Tensor) or weights:
        return total / weights
    return total * math.nan


def _widen(value: Any) -> Any:
    """Return a copy in a type that holds a sum: booleans and small integers as int64, as in
    `torch.sum`, and halves as float32.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().clone()
        if value.is_complex():
            return value
        if not value.is_floating_point():
            return value.to(torch.int64)
        return value.float() if value.itemsize < 4 else value
    if hasattr(value, "item"):  # a scalar of NumPy
        value = value.item()
    if not isinstance(value, (int, float)):
        raise UsageError(
            f"run.sum and run.mean got a {type(value).__name__}, but take numbers and tensors.",
            hint="Convert it with torch.as_tensor. run.gather takes any object.",
        )
    return +value  # of a bool, the number
