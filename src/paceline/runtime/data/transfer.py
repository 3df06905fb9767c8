"""Transfer batches to the device: any nesting of tensors, and on CUDA one batch ahead of the
computation.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def parts_of(data: Any) -> dict[Any, Any] | None:
    """Return what a container or a data class consists of; None for anything else."""
    if isinstance(data, Mapping):
        return dict(data)
    if isinstance(data, (list, tuple)):
        return dict(enumerate(data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return None


def rebuild(data: Any, parts: dict[Any, Any]) -> Any:
    """Return a container or a data class with other parts. A mapping becomes a dictionary."""
    if isinstance(data, tuple):
        return type(data)(*parts.values()) if hasattr(data, "_fields") else tuple(parts.values())
    if isinstance(data, list):
        return list(parts.values())
    if isinstance(data, Mapping):
        return parts
    rebuilt = copy.copy(data)
    for name, value in parts.items():
        object.__setattr__(rebuilt, name, value)  # it may be frozen
    return rebuilt


def map_tensors(data: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function to every tensor of a nested structure and leave everything else alone."""
    if isinstance(data, torch.Tensor):
        return function(data)
    parts = parts_of(data)
    if parts is None:
        return data
    return rebuild(data, {name: map_tensors(each, function) for name, each in parts.items()})


def to_device(data: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Move all tensors, and any other object with `.to(device)` (PackedSequence, BatchEncoding,
    graphs).
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if hasattr(data, "to"):
        return data.to(device)
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def transfer_batches(batches: Iterator[Any], device: torch.device | None) -> Iterator[Any]:
    """Yield the batches on the device, prefetched on CUDA. Without a device they stay on the
    CPU.
    """
    if device is None or device.type == "cpu":
        return batches
    if device.type == "cuda":
        return _prefetch(batches, device)
    return (transfer_batch(batch, device) for batch in batches)


def transfer_batch(batch: Any, device: torch.device | None) -> Any:
    """Move one batch to the device without blocking the host."""
    if device is None or device.type == "cpu":
        return batch
    return to_device(map_tensors(batch, _pin) if device.type == "cuda" else batch, device)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    # Only copies from pinned memory run without blocking the host.
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def _prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy the next batch on a separate stream while the model works on the current one."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready: list[tuple[Any, torch.cuda.Event]] = []
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = transfer_batch(batch, device)
            ready.append((moved, stream.record_event()))
        if len(ready) == 2:
            yield _wait_for_copy(*ready.pop(0))
    for moved, copied in ready:
        yield _wait_for_copy(moved, copied)


def _wait_for_copy(batch: Any, copied: torch.cuda.Event) -> Any:
    """Make the current stream wait until a batch has been copied."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)

    def record(tensor: torch.Tensor) -> torch.Tensor:
        # Keeps the allocator from reusing the memory on the copy stream while the model still reads
        # it.
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    return map_tensors(batch, record)
