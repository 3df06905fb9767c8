"""Which bytes of the replicated state each rank writes: one stream of all tensors, cut evenly by bytes.

Every rank works this out alone from the names, dtypes and shapes that all hold alike; the digest in its report
proves that they did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contract.checkpoint.safetensors import Piece, header
from paceline.runtime.checkpoint.state_tree import DTYPE_NAMES

SMALL = 1 << 20  # pieces below this are gathered on a GPU before they cross to the host
SMALLEST_SHARE = 1 << 18  # less than this is not worth a file of its own

Signature = list[tuple[str, torch.Size, torch.dtype]]


def signature(tensors: Mapping[str, torch.Tensor]) -> Signature:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


@dataclass(frozen=True)
class Share:
    """One rank's part: its pieces in file order, the file's header, and what all ranks must agree on."""

    pieces: list[Piece]
    head: bytes
    nbytes: int  # of the pieces, without the header
    digest: str
    local: list[tuple[str, int, int]]  # local parts of sharded tensors, behind the file: name, offset, bytes
    local_nbytes: int


def cut(
    tensors: Mapping[str, torch.Tensor], sharded: Mapping[str, Any], *, rank: int, world_size: int
) -> Share:
    """The share of `rank`. Wider elements come first, so that every piece is aligned wherever the cut falls."""
    ordered = sorted(tensors.items(), key=_place)
    total = sum(tensor.nbytes for _, tensor in ordered)
    writers = max(1, min(world_size, total // SMALLEST_SHARE))
    low, high = (total * rank // writers, total * (rank + 1) // writers) if rank < writers else (total, total)
    pieces: list[Piece] = []
    position = offset = 0
    for name, tensor in ordered:
        size = tensor.element_size()
        # Element by element: the one that holds the cut's first byte belongs to the rank before it.
        start = min(max(-(-(low - position) // size), 0), tensor.numel())
        stop = min(max(-(-(high - position) // size), 0), tensor.numel())
        is_whole = start == 0 and stop == tensor.numel() and (stop > 0 or rank == 0)
        if stop > start or is_whole:
            nbytes = (stop - start) * size
            pieces.append(
                Piece(
                    name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), start=start,
                    stop=stop, offset=offset, nbytes=nbytes, is_whole=is_whole,
                )
            )  # fmt: skip
            offset += nbytes
        position += tensor.nbytes
    local, local_nbytes = _local_parts(sharded)
    return Share(
        pieces=pieces, head=header(pieces), nbytes=offset, digest=_digest(ordered, sharded),
        local=local, local_nbytes=local_nbytes,
    )  # fmt: skip


def _place(item: tuple[str, torch.Tensor]) -> tuple[int, bool, str, str]:
    name, tensor = item
    return -tensor.element_size(), tensor.nbytes < SMALL, tensor.device.type, name


def _local_parts(sharded: Mapping[str, Any]) -> tuple[list[tuple[str, int, int]], int]:
    parts, offset = [], 0
    for name, tensor in sorted(sharded.items(), key=lambda item: (-item[1].element_size(), item[0])):
        nbytes = tensor.to_local().nbytes
        parts.append((name, offset, nbytes))
        offset += nbytes
    return parts, offset


def _digest(ordered: list[tuple[str, torch.Tensor]], sharded: Mapping[str, Any]) -> str:
    whole = hashlib.blake2b(digest_size=8)
    for name, tensor in [*ordered, *sorted(sharded.items())]:
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return whole.hexdigest()
