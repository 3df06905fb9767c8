"""What a rank writes into its file of a checkpoint, and the memory in which that file is made.

Each rank has a share: an even part of the bytes of all replicated tensors, and its own state. It
computes the split alone from names, dtypes and shapes, which are the same on all ranks; rank 0
compares the digests in their reports to make sure. Buffers may differ between ranks, so rank 0
writes them alone: parts of several ranks would not fit together.

The memory is an image of the file, header and tensors, block by block; saving copies tensors into
it. It is mapped once and reused, because touched pages cost nothing at the next save. It isn't
inherited by forked processes: with data-loader workers, every page would be copied on write at the
next save. On CUDA it is page-locked, and small tensors are packed on the device first, so that
thousands of them take few copies.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.runtime.checkpoint.safetensors import (
    BLOCK,
    DTYPE_NAMES,
    TORCH_DTYPES,
    Piece,
    make_header,
)
from paceline.runtime.checkpoint.state_tree import StateTensors

# PYFUNCTYPE keeps the interpreter lock: releasing it would let other threads take it thousands of
# times.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
PACK_BYTES = 64 << 20  # device memory in which small tensors are packed
SMALL = 1 << 20  # smaller pieces are packed on a GPU before they are copied to the host
MIN_SHARE = 1 << 18  # fewer bytes are not worth a file of their own

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
        if stop > start or (rank == 0 and not tensor.numel()):
            dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
            pieces.append(Piece(name, dtype, shape, start, stop, offset))
            offset += pieces[-1].nbytes
        position += 0 if is_own else tensor.nbytes
    return Share(pieces, make_header(pieces), offset, digest)


def _sort_key(item: tuple[str, torch.Tensor]) -> tuple[int, bool, str, str]:
    name, tensor = item
    return -tensor.element_size(), tensor.nbytes < SMALL, tensor.device.type, name


def _digest(
    tensors: Mapping[str, torch.Tensor], sharded: Mapping[str, Any], rank_zero: Collection[str]
) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in [*sorted(tensors.items(), key=_sort_key), *sorted(sharded.items())]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {name in rank_zero}\n".encode())
    return digest.hexdigest()


@dataclass
class PackedRun:
    """Small neighbouring pieces: packed on the device, then copied to the host at once."""

    names: list[str]
    views: list[torch.Tensor]
    device: torch.Tensor
    host: torch.Tensor


class Image:
    """The buffer of one share and the views of its pieces, created once and filled at every
    save.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.file_size = len(share.header) + share.nbytes
        self.padded = -(-self.file_size // BLOCK) * BLOCK
        self.map = _map_memory(self.padded + BLOCK)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.pinned = False
        self._views: dict[str, torch.Tensor] | None = None
        self._packed: list[PackedRun] | None = None

    def touch(self) -> None:
        """Allocate the pages before a save needs them, and write the header, which never
        changes.
        """
        self.bytes.zero_()
        begin = len(self.share.header)
        self.map[:begin] = self.share.header
        data = self.bytes[begin : self.file_size]
        self._views = {
            piece.name: _view(data[piece.offset : piece.offset + piece.nbytes], piece)
            for piece in self.share.pieces
        }

    def pin(self) -> None:
        """Page-lock the memory, so that copies from a GPU run asynchronously."""
        if not self.pinned:
            status = _cudart().cudaHostRegister(self.bytes.data_ptr(), len(self.map), 0)
            self.pinned = int(status) == 0

    def memory(self) -> memoryview:
        """Return the file's content, padded to whole blocks."""
        return memoryview(self.map)[: self.padded]

    def fill(self, state: StateTensors) -> torch.cuda.Event | None:
        """Copy the tensors in. On CUDA the copies are only queued: wait for the event before
        reading.
        """
        if self._views is None:
            self.touch()
        assert self._views is not None
        tensors = state.in_share
        sources = {piece.name: _part(tensors[piece.name], piece) for piece in self.share.pieces}
        on_cuda = next((tensor.device for tensor in sources.values() if tensor.is_cuda), None)
        devices = (
            {tensor.get_device() for tensor in sources.values()} if on_cuda is not None else set()
        )
        with torch.no_grad():
            if on_cuda is not None:
                self.pin()
                self._fill_packed(sources, on_cuda)
            self._fill_small(sources)
            if sources:
                names = list(sources)
                targets = [self._views[name] for name in names]
                torch._foreach_copy_(
                    targets, [sources[name] for name in names], non_blocking=self.pinned
                )
        if on_cuda is None:
            return None
        stream = torch.cuda.current_stream(on_cuda)
        for device in devices - {-1, on_cuda.index}:  # a model on several GPUs
            stream.wait_stream(torch.cuda.current_stream(device))
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _fill_small(self, sources: dict[str, torch.Tensor]) -> None:
        """Copy small CPU tensors: torch would wake all its threads for each of thousands of
        them.
        """
        begin = self.bytes.data_ptr() + len(self.share.header)
        for piece in self.share.pieces:
            source = sources.get(piece.name) if 0 < piece.nbytes < SMALL else None
            if (
                source is not None
                and source.is_cpu
                and source.is_contiguous()
                and not source.is_complex()
            ):
                _copy(begin + piece.offset, source.data_ptr(), piece.nbytes)
                del sources[piece.name]

    def _fill_packed(self, sources: dict[str, torch.Tensor], device: torch.device) -> None:
        if self._packed is None:
            self._packed = self._plan_packing(sources, device)
        for run in self._packed:
            torch._foreach_copy_(run.views, [sources.pop(name) for name in run.names])
            run.host.copy_(run.device, non_blocking=True)

    def _plan_packing(
        self, sources: dict[str, torch.Tensor], device: torch.device
    ) -> list[PackedRun]:
        small = [
            piece
            for piece in self.share.pieces
            if 0 < piece.nbytes < SMALL and sources[piece.name].device == device
        ]
        runs: list[list[Piece]] = []
        for piece in small:
            last = runs[-1] if runs else None
            follows = last is not None and last[-1].offset + last[-1].nbytes == piece.offset
            if (
                last is not None
                and follows
                and piece.offset + piece.nbytes - last[0].offset <= PACK_BYTES
            ):
                last.append(piece)
            else:
                runs.append([piece])
        if not runs:
            return []
        longest = max(run[-1].offset + run[-1].nbytes - run[0].offset for run in runs)
        buffer = torch.empty(longest, dtype=torch.uint8, device=device)
        return [self._packed_run(run, buffer) for run in runs]

    def _packed_run(self, run: list[Piece], buffer: torch.Tensor) -> PackedRun:
        first, last = run[0].offset, run[-1].offset + run[-1].nbytes
        views = [
            _view(buffer[piece.offset - first : piece.offset - first + piece.nbytes], piece)
            for piece in run
        ]
        begin = len(self.share.header)
        host = self.bytes[begin + first : begin + last]
        return PackedRun([piece.name for piece in run], views, buffer[: last - first], host)

    def close(self) -> None:
        if self.pinned:
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False


class ImageCache:
    """Holds the image for the next save until the state's layout changes."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._image: Image | None = None
        self._layout: Any = None

    def get(self, state: StateTensors) -> Image:
        """Return an image that fits this state."""
        layout = _layout(state)
        if self._image is None or self._layout != layout:
            self.release()
            state.check()
            self._image, self._layout = self._make(state), layout
        return self._image

    def release(self) -> None:
        if self._image is not None:
            self._image.close()
            self._image = None

    def _make(self, state: StateTensors) -> Image:
        return Image(
            make_share(
                state.tensors,
                state.sharded,
                own=state.own,
                rank_zero=state.rank_zero,
                rank=self.rank,
                world_size=self.world_size,
            )
        )


def _layout(state: StateTensors) -> Any:
    """Return what an image depends on: all names, shapes and dtypes."""
    return signature(state.in_share), signature(state.sharded), state.rank_zero


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_memory(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel without it: slower, but correct
    return memory


def _view(data: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece's bytes as a tensor of its dtype and shape."""
    flat: Any = data
    shape = piece.shape if piece.is_whole else (piece.stop - piece.start,)
    view: torch.Tensor = flat.view(TORCH_DTYPES[piece.dtype]).view(shape)
    return view


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor if piece.is_whole else tensor.reshape(-1)[piece.start : piece.stop]
