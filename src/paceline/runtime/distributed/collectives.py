"""Sums and gathered values over all ranks, of tensors, numbers and objects."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import default_restore_location

from paceline.errors import UsageError
from paceline.runtime.distributed.process_group import ProcessGroups

# What `gather` exchanges first: what the value is, the shape of a tensor or the bytes of an object,
# and why it cannot be sent.
Header = tuple[str, Any, str]

# What `sum_over_ranks` exchanges first: a number, or the tensor's device, dtype and shape.
Addend = float | tuple[str, torch.dtype, tuple[int, ...]]

# What is summed, which must be the same on all ranks: the next sums would be those of other values
# otherwise.
PLAIN, SHARES, WEIGHTS, NEGATIVE = "no weight", "a weight", "weights", "a negative weight"


def sum_over_ranks(
    value: Any, group: ProcessGroups, device: torch.device, *, what: str = PLAIN
) -> Any:
    """Return the sum of a tensor, on its own device, or of a number over all ranks.

    As in `torch.sum`, booleans and small integers become int64: a sum of True counts, and does not
    overflow. Ranks first tell each other what they have: one may still have the number 0 where
    others have a tensor.
    """
    total: torch.Tensor | None = None
    own: Addend
    if isinstance(value, torch.Tensor):
        total = value.detach().clone()
        if not total.is_floating_point() and not total.is_complex():
            total = total.to(torch.int64)
        own = total.device.type, total.dtype, tuple(total.shape)
    else:
        own = _plain_number(value)
    if group.main is None:
        _check_weights([what])
        return own if total is None else total
    gathered = [(what, own)] * dist.get_world_size(group.control)
    dist.all_gather_object(gathered, (what, own), group=group.control)
    _check_weights([each for each, _ in gathered])
    addends = [addend for _, addend in gathered]
    numbers = [each for each in addends if not isinstance(each, tuple)]
    kind = _check_addends(addends)
    if kind is None:
        return sum(numbers)
    place, dtype, shape = kind
    on_main = place == device.type
    if total is None:
        total = torch.zeros(shape, dtype=dtype, device=device if on_main else place)
    dist.all_reduce(total, group=group.main if on_main else group.control)
    return total + sum(numbers) if any(numbers) else total


def weighted_mean(value: Any, weight: Any, group: ProcessGroups, device: torch.device) -> Any:
    """Return the mean over ranks of a tensor or a number, of which each rank has `weight`; NaN if
    nobody has any.

    What has no weight counts nothing, even if it is NaN: the mean over no samples is.
    """
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize < 4:
        value = value.float()  # a sum over many tokens does not fit a half
    share = value * weight
    if isinstance(weight, torch.Tensor):
        share = torch.where(weight == 0, torch.zeros_like(share), share)
    elif not weight:
        share = torch.zeros_like(share) if isinstance(share, torch.Tensor) else 0
    is_negative = not isinstance(weight, torch.Tensor) and weight < 0
    total = sum_over_ranks(share, group, device, what=NEGATIVE if is_negative else SHARES)
    weights = sum_over_ranks(weight, group, device, what=WEIGHTS)
    if isinstance(weights, torch.Tensor) or weights:
        return total / weights
    return total * math.nan


def _check_weights(kinds: list[str]) -> None:
    """Raise the same error on all ranks if only some pass a weight, or if one is negative."""
    if NEGATIVE in kinds:
        raise UsageError(
            f"run.mean got a negative weight on rank {kinds.index(NEGATIVE)}.",
            hint="Pass the number of samples.",
        )
    for rank, each in enumerate(kinds):
        if each != kinds[0]:
            raise UsageError(
                f"run.mean got {kinds[0]} on rank 0, but {each} on rank {rank}.",
                hint="Pass a weight on all ranks or on none; 0 for a rank without samples.",
            )


def _check_addends(addends: list[Addend]) -> tuple[str, torch.dtype, tuple[int, ...]] | None:
    """Return what the tensors are, None if there are only numbers. Raises the same error on all
    ranks.
    """
    first = next((rank for rank, each in enumerate(addends) if isinstance(each, tuple)), None)
    if first is None:
        return None
    kind = addends[first]
    assert isinstance(kind, tuple)
    for rank, each in enumerate(addends):
        # A number adds up with a scalar. With other tensors, only 0 does: a rank that has added
        # nothing yet.
        fits = each == kind if isinstance(each, tuple) else not kind[2] or not each
        if not fits:
            raise UsageError(
                f"run.sum and run.mean got {_describe(kind)} on rank {first}, but "
                f"{_describe(each)} on rank {rank}.",
                hint="Pass tensors of the same shape and dtype on all ranks, or numbers.",
            )
    return kind


def _describe(addend: Addend) -> str:
    if not isinstance(addend, tuple):
        return f"the number {addend}"
    place, dtype, shape = addend
    return f"a {place} tensor of {dtype} and shape {shape}"


def _plain_number(value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of NumPy
        value = value.item()
    if isinstance(value, int):
        return int(value)  # a bool too
    if isinstance(value, float):
        return float(value)
    raise UsageError(
        f"run.sum and run.mean got a {type(value).__name__}, but take numbers and tensors.",
        hint="Convert it with torch.as_tensor. run.gather takes any object.",
    )


def gather(value: Any, group: ProcessGroups, device: torch.device) -> list[Any]:
    """Return the values of all ranks, in their order: tensors of any shape, or objects that can be
    pickled.

    Tensors inside of objects arrive on the receiving rank's own device, or on the CPU if they were
    there.
    """
    if not isinstance(value, torch.Tensor):
        return _gather_objects(value, group, device)
    _check_tensor(value)
    kind = f"a {value.device.type} tensor of {value.dtype}"
    headers = _exchange((kind, tuple(value.shape), ""), group)
    _check_kinds(headers)
    flat = value.detach().contiguous().reshape(-1)
    if group.main is None:
        return [flat.clone().reshape(value.shape)]
    # Bytes travel at equal lengths, the longest rank's: backends do not take every dtype.
    sizes = [math.prod(shape) for _, shape, _ in headers]
    padded = torch.nn.functional.pad(
        flat.view(torch.uint8), (0, (max(sizes) - flat.numel()) * flat.itemsize)
    )
    parts = [torch.empty_like(padded) for _ in sizes]
    if max(sizes):
        is_main = value.device.type == device.type
        dist.all_gather(parts, padded, group=group.main if is_main else group.control)
    # copies, which do not keep the padding alive
    return [
        part.view(value.dtype)[:size].clone().reshape(shape)
        for part, size, (_, shape, _) in zip(parts, sizes, headers, strict=True)
    ]


def _gather_objects(value: Any, group: ProcessGroups, device: torch.device) -> list[Any]:
    def place(storage: Any, location: str) -> Any:  # the number of a GPU there is not the one here
        return default_restore_location(  # type: ignore[no-untyped-call]
            storage, location if location == "cpu" else str(device)
        )

    buffer, problem = io.BytesIO(), ""
    try:
        torch.save(value, buffer)
    # whatever the object's own methods raise: the other ranks must not wait for it
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    headers = _exchange(("an object", buffer.getvalue(), problem), group)
    _check_kinds(headers)
    # written by other ranks of this run
    return [
        torch.load(io.BytesIO(data), map_location=place, weights_only=False)
        for _, data, _ in headers
    ]


def _exchange(header: Header, group: ProcessGroups) -> list[Header]:
    """Return the headers of all ranks."""
    if group.main is None:
        return [header]
    headers = [header] * dist.get_world_size(group.main)
    dist.all_gather_object(headers, header, group=group.control)
    return headers


def _check_tensor(value: torch.Tensor) -> None:
    if hasattr(value, "full_tensor"):
        raise UsageError(
            "run.gather got a sharded tensor (DTensor).", hint="Pass value.full_tensor()."
        )
    if value.layout is not torch.strided or value.is_meta:
        raise UsageError(
            f"run.gather got a {value.layout} tensor on {value.device}.",
            hint="Pass a dense tensor that has values.",
        )


def _check_kinds(headers: list[Header]) -> None:
    """Raise the same error on all ranks if their values do not fit together."""
    for rank, (kind, _, problem) in enumerate(headers):
        if problem:
            raise UsageError(
                f"run.gather could not pickle the object of rank {rank}: {problem}",
                hint="Pass plain values, tensors or NumPy arrays.",
            )
        if kind != headers[0][0]:
            raise UsageError(
                f"run.gather got {headers[0][0]} on rank 0, but {kind} on rank {rank}.",
                hint="Pass the same kind of value on all ranks.",
            )
