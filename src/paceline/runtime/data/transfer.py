"""Batches on their way to the device: any nesting of tensors, and on CUDA one batch ahead of the compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(data: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with every tensor changed; anything else stays as it is."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, change) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = [map_tensors(value, change) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, list):
        return [map_tensors(value, change) for value in data]
    return data


def to_device(data: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Move all tensors of a batch, and whatever else knows `.to(device)` (PackedSequence, BatchEncoding, graphs)."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if not isinstance(data, (Mapping, tuple, list)) or hasattr(data, "to"):
        return data.to(device) if hasattr(data, "to") else data
    return map_tensors(data, lambda each: each.to(device, non_blocking=non_blocking))


def trim(data: Any, count: int) -> Any:
    """The first `count` samples of a batch: of its tensors, and of its lists of other things."""
    if isinstance(data, list) and data and not isinstance(data[0], (torch.Tensor, Mapping, tuple, list)):
        return data[:count]
    if isinstance(data, Mapping):
        return {key: trim(value, count) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = [trim(value, count) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, list):
        return [trim(value, count) for value in data]
    return data[:count] if isinstance(data, torch.Tensor) and data.dim() else data


def feed(batches: Iterator[Any], device: torch.device | None) -> Iterator[Any]:
    """The batches, on the device. With no device they stay where they are."""
    if device is None or device.type == "cpu":
        return batches
    if device.type == "cuda":
        return _one_ahead(batches, device)
    return (move(batch, device) for batch in batches)


def move(batch: Any, device: torch.device | None) -> Any:
    """One batch on the device, the host not waiting for it."""
    if device is None or device.type == "cpu":
        return batch
    return to_device(map_tensors(batch, _pinned) if device.type == "cuda" else batch, device)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # Only pinned memory is copied without the host waiting for it.
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def _one_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """While the model works on one batch, the next is copied on a stream of its own."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready: list[tuple[Any, torch.cuda.Event]] = []
    for batch in batches:
        with torch.cuda.stream(stream):
            moved = move(batch, device)
            ready.append((moved, stream.record_event()))
        if len(ready) == 2:
            yield _handed_over(*ready.pop(0))
    for moved, copied in ready:
        yield _handed_over(moved, copied)


def _handed_over(batch: Any, copied: torch.cuda.Event) -> Any:
    current = torch.cuda.current_stream()
    current.wait_event(copied)

    def record(tensor: torch.Tensor) -> torch.Tensor:
        # The allocator must not give the memory to the copying stream while the model still reads it.
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    return map_tensors(batch, record)
