"""A checksum of the bits of many tensors, computed on their devices without waiting for them.

The bits are read as 64-bit integers, each is multiplied by an odd weight that depends on its
position, and the products are added up, modulo 2**64. So one changed bit always changes the sum,
exchanged values and changes that cancel out in a plain sum do too, and NaN is a value like any
other. Integer sums do not depend on their order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.runtime.metrics.reduction import PendingScalars

WORD = 8  # bytes
COLUMNS = 2048  # words that are a row; rows have weights of their own
# bytes: small tensors are added up together, and large ones in slices of this size
BUCKET = 1 << 24
MAX_ROWS = 2 * BUCKET // (WORD * COLUMNS) + 1  # small tensors together may be almost twice as large

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """The checksum of these tensors, which is being computed. They may change afterwards."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        bits: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        self._start = 0
        for tensor in tensors:
            found = as_integers(tensor)
            self._start = self._start * 31 + found.numel() + 1
            bits.setdefault((found.device, found.element_size()), []).append(found)
        sums: dict[torch.device, list[torch.Tensor]] = {}
        for (device, size), parts in bits.items():
            sums.setdefault(device, []).extend(_weighted_sums(parts, size))
        self._pending = [PendingScalars(each, torch.int64) for each in sums.values() if each]

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
    """Return the bits of a tensor as a vector of integers, in the order of its elements."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


def _weighted_sums(parts: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Return the sums of vectors on one device with elements of `size` bytes, one per bucket."""
    found: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    length, bucket = 0, BUCKET // size
    for part in parts:
        rest = part
        if part.numel() >= bucket and part.storage_offset() * size % WORD == 0:
            whole = part.numel() // bucket * bucket
            found += [_weighted_sum(each) for each in torch.split(part[:whole], bucket)]
            rest = part[whole:]
        small.append(rest)
        length += rest.numel()
        if length >= bucket:
            found.append(_weighted_sum(_joined(small)))
            small, length = [], 0
    if length:
        found.append(_weighted_sum(_joined(small)))
    return found


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the vectors as one, with zeros at the end for a whole number of rows."""
    row = COLUMNS * WORD // parts[0].element_size()
    missing = -sum(part.numel() for part in parts) % row
    return torch.cat([*parts, parts[0].new_zeros(missing)])


def _weighted_sum(bits: torch.Tensor) -> torch.Tensor:
    words = bits.view(torch.int64).view(-1, COLUMNS)
    weights = _weights(words.device)
    by_row = (words * weights[:COLUMNS]).sum(1)
    return (by_row * weights[COLUMNS : COLUMNS + len(by_row)]).sum()


_cached: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers that look random (splitmix64)."""
    found = _cached.get(device)
    if found is None:
        mixed = torch.arange(1, COLUMNS + MAX_ROWS + 1, device=device) * -0x61C8864680B583EB
        mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
        mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
        found = _cached[device] = (mixed ^ (mixed >> 31)) | 1
    return found
