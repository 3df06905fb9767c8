"""A checksum of the bits of many tensors, computed on their devices without waiting for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from paceline.runtime.metrics.reduction import PendingScalars

WORD = 8  # bytes
CHUNK = 1 << 18  # elements that are added up at once
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """A checksum of the bits of these tensors, which is computed on their devices without waiting
    for them. They may change afterwards.

    The bits of each element are multiplied by an odd weight that depends on its position, and the
    products are added up, modulo 2**64. So one changed bit always changes the sum, exchanged values
    do too, and NaN is a value like any other.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        sums: dict[torch.device, list[torch.Tensor]] = {}
        self._start = 0
        for tensor in tensors:
            bits = as_integers(tensor)
            self._start = self._start * 31 + bits.numel() + 1
            weights = _weights(bits.device)
            for part in torch.split(bits, CHUNK):
                sums.setdefault(bits.device, []).append((part * weights[: len(part)]).sum())
        self._pending = [PendingScalars(each, torch.int64) for each in sums.values()]

    def value(self) -> int:
        """Return the checksum, between 0 and 2**63. Waits for the device."""
        total = self._start
        for pending in self._pending:
            for each in pending.values():
                total = (total * 0x9E3779B97F4A7C15 + int(each)) % (1 << 64)
        return (total ^ (total >> 32)) % (1 << 63)


def is_comparable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has plain values."""
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_meta and not tensor.is_quantized


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as a vector of integers, in the order of its elements: whole
    words if they fill them.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    size = flat.element_size()
    if flat.nbytes % WORD:
        return flat.view(INTEGERS[size])
    if flat.storage_offset() * size % WORD:
        flat = flat.clone()  # which is aligned, as words must be
    return flat.view(torch.int64)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers that look random, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 62), 1 << 62, (CHUNK,), generator=generator) | 1).to(device)
