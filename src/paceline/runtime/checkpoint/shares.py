"""Decide what each rank writes: an even part of the bytes of all replicated tensors, and its own
state.

Buffers may differ between ranks, so rank 0 writes them alone: parts of several ranks would not fit
together.

Every rank computes the split alone from names, dtypes and shapes, which are the same on all ranks.
Rank 0 compares the digests in their reports to make sure. Ranks compare digests to find out whether
state is the same on all of them.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contract.safetensors import Piece, make_header
from paceline.runtime.checkpoint.state_tree import DTYPE_NAMES, canonical_json

SMALL = 1 << 20  # smaller pieces are packed on a GPU before they are copied to the host
MIN_SHARE = 1 << 18  # fewer bytes are not worth a file of their own

MAX_SAMPLE = 1 << 16  # elements of an object's tensors that ranks compare
MIN_SAMPLE = 64  # of each tensor

Signature = list[tuple[str, torch.Size, torch.dtype]]


def signature(tensors: Mapping[str, torch.Tensor]) -> Signature:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


@dataclass(frozen=True)
class Share:
    """One rank's part of the state: its pieces in file order, the file's header, and a digest to
    compare.
    """

    pieces: list[Piece]
    header: bytes
    nbytes: int  # of the pieces, without the header
    digest: str
    # local parts of sharded tensors, after the file: name, offset, bytes
    local: list[tuple[str, int, int]]
    local_nbytes: int


def make_share(
    tensors: Mapping[str, torch.Tensor],
    sharded: Mapping[str, Any],
    *,
    own: Mapping[str, torch.Tensor],
    rank_zero: Collection[str] = (),
    rank: int,
    world_size: int,
) -> Share:
    """Return the share of `rank`, with its own tensors. Wider elements come first, so that every
    piece is aligned.
    """
    digest, all_tensors = _digest(tensors, sharded, rank_zero), tensors
    if rank_zero:
        own = {**own, **{name: tensors[name] for name in rank_zero}} if rank == 0 else own
        tensors = {name: tensor for name, tensor in tensors.items() if name not in rank_zero}
    total = sum(tensor.nbytes for tensor in all_tensors.values())
    # bytes that rank 0 writes in any case
    first = total - sum(tensor.nbytes for tensor in tensors.values())
    writers = max(1, min(world_size, total // MIN_SHARE))
    low, high = (
        max(0, total * min(number, writers) // writers - first) for number in (rank, rank + 1)
    )
    pieces: list[Piece] = []
    position = offset = 0
    for name, tensor in sorted([*tensors.items(), *own.items()], key=_sort_key):
        size = tensor.element_size()
        is_own = name in own
        # Elements are never split: the one at the boundary belongs to the lower rank.
        start = 0 if is_own else min(max(-(-(low - position) // size), 0), tensor.numel())
        stop = (
            tensor.numel() if is_own else min(max(-(-(high - position) // size), 0), tensor.numel())
        )
        is_whole = start == 0 and stop == tensor.numel() and (stop > 0 or rank == 0)
        if stop > start or is_whole:
            nbytes = (stop - start) * size
            pieces.append(
                Piece(
                    name=name,
                    dtype=DTYPE_NAMES[tensor.dtype],
                    shape=tuple(tensor.shape),
                    start=start,
                    stop=stop,
                    offset=offset,
                    nbytes=nbytes,
                    is_whole=is_whole,
                )
            )
            offset += nbytes
        position += 0 if is_own else tensor.nbytes
    local, local_nbytes = _local_parts(sharded)
    return Share(
        pieces=pieces,
        header=make_header(pieces),
        nbytes=offset,
        digest=digest,
        local=local,
        local_nbytes=local_nbytes,
    )


def _sort_key(item: tuple[str, torch.Tensor]) -> tuple[int, bool, str, str]:
    name, tensor = item
    return -tensor.element_size(), tensor.nbytes < SMALL, tensor.device.type, name


def _local_parts(sharded: Mapping[str, Any]) -> tuple[list[tuple[str, int, int]], int]:
    parts, offset = [], 0
    for name, tensor in sorted(
        sharded.items(), key=lambda item: (-item[1].element_size(), item[0])
    ):
        nbytes = tensor.to_local().nbytes
        parts.append((name, offset, nbytes))
        offset += nbytes
    return parts, offset


def _digest(
    tensors: Mapping[str, torch.Tensor], sharded: Mapping[str, Any], rank_zero: Collection[str]
) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in [*sorted(tensors.items(), key=_sort_key), *sorted(sharded.items())]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {name in rank_zero}\n".encode())
    return digest.hexdigest()


# -- state that differs between ranks
# ------------------------------------------------------------------


def digest_state(tree: Any, tensors: Iterable[torch.Tensor]) -> int:
    """Return a digest of plain values and of evenly spaced elements of the tensors."""
    tensors = list(tensors)
    per_tensor = max(MIN_SAMPLE, MAX_SAMPLE // max(1, len(tensors)))
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        samples.setdefault((tensor.device, tensor.dtype), []).append(
            flat[:: max(1, len(flat) // per_tensor)]
        )
    # an int64, also when negated
    digest = hashlib.blake2b(canonical_json(tree).encode(), digest_size=7)
    digest.update(str([tensor.shape for tensor in tensors]).encode())
    for parts in samples.values():
        raw = torch.cat(parts).view(torch.uint8).cpu()
        digest.update(ctypes.string_at(raw.data_ptr(), raw.numel()))
    return int.from_bytes(digest.digest(), "little")


def find_differing(digests: Mapping[str, int], group: Any) -> set[str]:
    """Return the names whose digests are not the same on all ranks. A collective; all ranks pass
    the same names.
    """
    values = torch.tensor(list(digests.values()), dtype=torch.int64)
    highest = torch.cat([values, -values])
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    top, bottom = highest.chunk(2)
    return {name for name, same in zip(digests, (top == -bottom).tolist(), strict=True) if not same}
