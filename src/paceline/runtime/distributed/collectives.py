"""Sums and gathered values over all ranks, of tensors, numbers and objects."""

from __future__ import annotations

import ctypes
import io
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import default_restore_location

from paceline.errors import RunError, UsageError
from paceline.runtime.distributed.process_group import ProcessGroups

# What `gather` exchanges first: what the value is, its bytes, its shape, and why it cannot be sent.
Header = tuple[str, int, tuple[int, ...], str]


def sum_tensor(value: torch.Tensor, group: ProcessGroups, device: torch.device) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, on the tensor's own device.

    As in `torch.sum`, booleans and small integers become int64: a sum of True counts, and does not overflow.
    """
    total = value.detach().clone()
    if not total.is_floating_point() and not total.is_complex():
        total = total.to(torch.int64)
    if group.main is not None:
        dist.all_reduce(total, group=group.main if total.device.type == device.type else group.control)
    return total


def sum_number(value: Any, group: ProcessGroups) -> float:
    """Return the sum of a Python number over all ranks."""
    number = _plain_number(value)
    if group.main is None:
        return number
    # Gathered, not reduced: one rank may have an int, such as a count that is still 0, where others have a float.
    is_float = isinstance(number, float)
    own = torch.zeros(2, dtype=torch.int64)
    own[0] = is_float
    own[1:] = torch.tensor([number], dtype=torch.float64).view(torch.int64) if is_float else number
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group.control))]
    dist.all_gather(parts, own, group=group.control)
    return sum(part[1:].view(torch.float64).item() if part[0] else int(part[1]) for part in parts)


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
    """Return the values of all ranks, in their order: tensors of any shape, or objects that can be pickled.

    Tensors inside of objects arrive on the receiving rank's own device, or on the CPU if they were there.
    """
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor:
        _check_tensor(value)
        kind = f"a {value.device.type} tensor of {value.dtype}"
        payload, problem = value.detach().contiguous().reshape(-1).view(torch.uint8), ""
        shape = tuple(value.shape)
    else:
        kind, shape = "an object", ()
        payload, problem = _pickle(value)
    headers: list[Header] = [(kind, payload.numel(), shape, problem)]
    if group.main is not None:
        headers = [headers[0]] * dist.get_world_size(group.main)
        dist.all_gather_object(headers, (kind, payload.numel(), shape, problem), group=group.control)
    _check_headers(headers)
    parts = _all_gather(payload, [header[1] for header in headers], group, device)
    if is_tensor:
        return [part.view(value.dtype).reshape(header[2]) for part, header in zip(parts, headers, strict=True)]
    return [_unpickle(part, device) for part in parts]


def _all_gather(
    payload: torch.Tensor, sizes: list[int], group: ProcessGroups, device: torch.device
) -> list[torch.Tensor]:
    """Return the bytes of all ranks. They travel at equal lengths, the longest rank's."""
    if group.main is None:
        return [payload.clone()]
    longest = max(sizes)
    if not longest:
        return [payload.clone() for _ in sizes]
    padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group.main if payload.device.type == device.type else group.control)
    # Copies of their own: a view of another dtype needs an aligned start, and must not keep the padding alive.
    return [part if size == longest else part[:size].clone() for part, size in zip(parts, sizes, strict=True)]


def _check_tensor(value: torch.Tensor) -> None:
    if hasattr(value, "full_tensor"):
        raise UsageError("run.gather got a sharded tensor (DTensor).", hint="Pass value.full_tensor().")
    if value.layout is not torch.strided or value.is_meta:
        raise UsageError(
            f"run.gather got a {value.layout} tensor on {value.device}.", hint="Pass a dense tensor that has values."
        )


def _check_headers(headers: list[Header]) -> None:
    """Raise the same error on all ranks if their values do not fit together."""
    for rank, (kind, _, _, problem) in enumerate(headers):
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


def _pickle(value: Any) -> tuple[torch.Tensor, str]:
    """Return the bytes of an object, and why it has none."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # whatever the object's own methods raise: the other ranks must not wait for it
        return torch.empty(0, dtype=torch.uint8), f"{type(error).__name__}: {error}"
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8), ""


def _unpickle(payload: torch.Tensor, device: torch.device) -> Any:
    buffer = io.BytesIO(ctypes.string_at(payload.data_ptr(), payload.numel()))

    def place(storage: Any, location: str) -> Any:  # the number of a GPU there is not the one here
        return default_restore_location(  # type: ignore[no-untyped-call]
            storage, location if location == "cpu" else str(device)
        )

    try:
        return torch.load(buffer, map_location=place, weights_only=False)  # written by another rank of this run
    except Exception as error:
        raise RunError(f"run.gather could not unpickle an object: {error}", hint="Pass plain values.") from error
