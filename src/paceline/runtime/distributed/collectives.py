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

# A tensor's device, dtype and shape; and what a rank adds to a sum: a number, or such a tensor.
Kind = tuple[str, torch.dtype, tuple[int, ...]]
Addend = float | Kind


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
    if isinstance(share, torch.Tensor) and share.dtype is torch.int64:
        share = share.float() if share.device.type == "mps" else share.double()
    if isinstance(weight, torch.Tensor):
        share = share * weight
        share = torch.where(weight == 0, torch.zeros_like(share), share)
    elif weight:
        share = share * weight
    else:
        share = torch.zeros_like(share) if isinstance(share, torch.Tensor) else 0
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


def _exchange(own: Any, group: ProcessGroups) -> list[Any]:
    """Return what all ranks have, in their order: small objects."""
    if group.main is None:
        return [own]
    found = [own] * dist.get_world_size(group.main)
    dist.all_gather_object(found, own, group=group.control)
    return found


def _check_calls(calls: list[tuple[str, Addend]]) -> Kind | None:
    """Return what the tensors are, None if there are only numbers.

    Raises the same error on all ranks if what they add up does not fit together.
    """
    kind = None
    for rank, (what, own) in enumerate(calls):
        if what != calls[0][0]:
            raise UsageError(
                f"Rank 0 has called {calls[0][0]}, but rank {rank} {what}.",
                hint="Call the same on all ranks; with weight=0 on a rank without samples.",
            )
        if isinstance(own, tuple):
            kind = kind or own
    for rank, (_, own) in enumerate(calls):
        if kind is not None and own not in (kind, 0):
            raise UsageError(
                f"run.sum and run.mean got {_describe(kind)} on one rank, but {_describe(own)} on "
                f"rank {rank}.",
                hint="Pass tensors of the same shape and dtype on all ranks, or the number 0.",
            )
    return kind


def _describe(addend: Addend) -> str:
    if not isinstance(addend, tuple):
        return f"the number {addend}"
    place, dtype, shape = addend
    return f"a {place} tensor of {dtype} and shape {shape}"


def gather(value: Any, group: ProcessGroups, device: torch.device) -> list[Any]:
    """Return the values of all ranks, in their order: anything that can be pickled.

    Tensors, also those inside of objects, arrive on the receiving rank's own device, or on the CPU
    if they were there.
    """

    def place(storage: Any, location: str) -> Any:  # the number of a GPU there is not the one here
        return default_restore_location(  # type: ignore[no-untyped-call]
            storage, location if location == "cpu" else str(device)
        )

    buffer, problem = io.BytesIO(), ""
    try:
        if hasattr(value, "full_tensor"):
            raise TypeError("a sharded tensor (DTensor); pass value.full_tensor()")
        # a copy has no more than the tensor's own elements, and no gradient
        torch.save(value.detach().clone() if isinstance(value, torch.Tensor) else value, buffer)
    # whatever the object's own methods raise: the other ranks must not wait for it
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    found = _exchange((buffer.getvalue(), problem), group)
    for rank, (_, reason) in enumerate(found):
        if reason:
            raise UsageError(
                f"run.gather could not pickle the object of rank {rank}: {reason}",
                hint="Pass plain values, tensors or NumPy arrays.",
            )
    # written by other ranks of this run
    return [
        torch.load(io.BytesIO(data), map_location=place, weights_only=False) for data, _ in found
    ]
