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


def cut_share(state: StateTensors, *, rank: int, world_size: int) -> list[Piece]:
    """Return what `rank` writes, in the order of its file. Wider elements come first, so that every
    piece is aligned.
    """
    alone = {name: state.tensors[name] for name in state.rank_zero}
    shared = {name: tensor for name, tensor in state.tensors.items() if name not in alone}
    own = {**state.own, **alone} if rank == 0 else state.own
    first = sum(tensor.nbytes for tensor in alone.values())  # bytes that rank 0 writes in any case
    total = first + sum(tensor.nbytes for tensor in shared.values())
    writers = max(1, min(world_size, total // MIN_SHARE))
    edges = [max(0, total * min(each, writers) // writers - first) for each in (rank, rank + 1)]
    pieces: list[Piece] = []
    position = offset = 0
    for name, tensor in sorted([*shared.items(), *own.items()], key=_sort_key):
        start, stop = 0, tensor.numel()
        if name in shared:
            # Elements are never split: the one at the boundary belongs to the lower rank.
            size = tensor.element_size()
            start, stop = (min(max(-(-(edge - position) // size), 0), stop) for edge in edges)
            position += tensor.nbytes
        if stop > start or (rank == 0 and not tensor.numel()):
            dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
            pieces.append(Piece(name, dtype, shape, start, stop, offset))
            offset = pieces[-1].end
    return pieces


def _sort_key(item: tuple[str, torch.Tensor]) -> tuple[int, bool, str, str]:
    name, tensor = item
    return -tensor.element_size(), tensor.nbytes < SMALL, tensor.device.type, name


def digest_layout(state: StateTensors) -> str:
    """Return a digest of what must be the same on all ranks for their shares to fit together."""
    digest = hashlib.blake2b(digest_size=8)
    for tensors in (state.tensors, state.sharded):
        for name, tensor in sorted(tensors.items(), key=lambda item: item[0]):
            is_alone = name in state.rank_zero
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {is_alone}\n".encode())
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

    def __init__(self, state: StateTensors, *, rank: int, world_size: int) -> None:
        state.check()
        self._layout = _layout(state)
        self.digest = digest_layout(state)
        self.pieces = cut_share(state, rank=rank, world_size=world_size)
        header = make_header(self.pieces)
        self.file_size = len(header) + sum(piece.nbytes for piece in self.pieces)
        # whole blocks, as the file is written
        self.memory = _map_memory(-(-self.file_size // BLOCK) * BLOCK)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._bytes.zero_()  # allocates the pages
        self.memory[: len(header)] = header
        self._data = self._bytes[len(header) : self.file_size]
        self._views = {
            piece.name: _view(self._data[piece.offset : piece.end], piece) for piece in self.pieces
        }
        self._is_pinned = False
        self._packed: list[PackedRun] | None = None

    def fits(self, state: StateTensors) -> bool:
        """Return whether this state has the layout that the image was made for."""
        return self._layout == _layout(state)

    def fill(self, state: StateTensors) -> torch.cuda.Event | None:
        """Copy the tensors in. On CUDA the copies are only queued: wait for the event before
        reading.
        """
        tensors = state.in_share
        sources = {piece.name: _part(tensors[piece.name], piece) for piece in self.pieces}
        devices = {each.device for each in sources.values() if each.is_cuda}
        device = min(devices, key=str, default=None)
        with torch.no_grad():
            if device is not None:
                self._pin()
                self._fill_packed(sources, device)
            self._fill_small(sources)
            if sources:
                targets = [self._views[name] for name in sources]
                torch._foreach_copy_(targets, list(sources.values()), non_blocking=self._is_pinned)
        if device is None:
            return None
        stream = torch.cuda.current_stream(device)
        for other in devices - {device}:  # a model on several GPUs
            stream.wait_stream(torch.cuda.current_stream(other))
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _pin(self) -> None:
        """Page-lock the memory, so that copies from a GPU run asynchronously."""
        if not self._is_pinned:
            status = _cudart().cudaHostRegister(self._bytes.data_ptr(), len(self.memory), 0)
            self._is_pinned = int(status) == 0

    def _fill_small(self, sources: dict[str, torch.Tensor]) -> None:
        """Copy small CPU tensors: torch would wake all its threads for each of thousands of
        them.
        """
        begin = self._data.data_ptr()
        for piece in self.pieces:
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
        runs: list[list[Piece]] = []
        for piece in self.pieces:
            if 0 < piece.nbytes < SMALL and sources[piece.name].device == device:
                follows = bool(runs) and runs[-1][-1].end == piece.offset
                if follows and piece.end - runs[-1][0].offset <= PACK_BYTES:
                    runs[-1].append(piece)
                else:
                    runs.append([piece])
        longest = max((run[-1].end - run[0].offset for run in runs), default=0)
        buffer = torch.empty(longest, dtype=torch.uint8, device=device)
        return [self._packed_run(run, buffer) for run in runs]

    def _packed_run(self, run: list[Piece], buffer: torch.Tensor) -> PackedRun:
        begin, end = run[0].offset, run[-1].end
        views = [_view(buffer[piece.offset - begin : piece.end - begin], piece) for piece in run]
        names = [piece.name for piece in run]
        return PackedRun(names, views, buffer[: end - begin], self._data[begin:end])

    def close(self) -> None:
        if self._is_pinned:
            _cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._is_pinned = False


def _layout(state: StateTensors) -> tuple[list[Any], set[str]]:
    """Return what an image depends on: all names, shapes and dtypes."""
    named = [*state.in_share.items(), *state.sharded.items()]
    return [(name, tensor.shape, tensor.dtype) for name, tensor in named], state.rank_zero


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
