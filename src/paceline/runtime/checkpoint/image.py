"""A share's file as it will be, in memory: header and tensors, block by block. Saving copies tensors into it.

The memory is mapped once and kept: pages that were touched before cost nothing at the next save. It does not
follow a fork (data-loader workers would make every page copy itself at the next save). On CUDA it is
page-locked, and small tensors are gathered on the device first, so that thousands of them cross in few copies.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contract.checkpoint.safetensors import BLOCK, Piece
from paceline.runtime.checkpoint.shares import SMALL, Share
from paceline.runtime.checkpoint.state_tree import TORCH_DTYPES, Taken

# Without giving up the interpreter: another thread would take it, thousands of times.
_copy = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
GATHER = 64 << 20  # device memory through which small tensors cross


@dataclass
class Gathered:
    """A run of small neighbours: packed on the device, then copied to the host at once."""

    names: list[str]
    views: list[torch.Tensor]
    device: torch.Tensor
    host: torch.Tensor


class Image:
    """The buffer of one share and the views of its pieces, made once and filled at every save."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.file_size = len(share.head) + share.nbytes
        self.padded = -(-self.file_size // BLOCK) * BLOCK
        self.map = _map_memory(self.padded + share.local_nbytes + BLOCK)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.pinned = False
        self._views: dict[str, torch.Tensor] | None = None
        self._locals: dict[str, torch.Tensor] = {}
        self._gathered: list[Gathered] | None = None

    def touch(self) -> None:
        """Make the pages real now, outside of any save, and write the header, which never changes."""
        self.bytes.zero_()
        head = len(self.share.head)
        self.map[:head] = self.share.head
        data = self.bytes[head : self.file_size]
        views: dict[str, torch.Tensor] = {}
        for piece in self.share.pieces:
            shape = piece.shape if piece.is_whole else (piece.stop - piece.start,)
            views[piece.name] = _view(data, piece, shape)
        self._views = views

    def pin(self) -> None:
        """Page-lock the memory, so that copies from a GPU run beside everything else."""
        if not self.pinned:
            status = _cuda().cudaHostRegister(self.bytes.data_ptr(), len(self.map), 0)
            self.pinned = int(status) == 0

    def memory(self) -> memoryview:
        """The file, in whole blocks."""
        return memoryview(self.map)[: self.padded]

    def fill(self, taken: Taken) -> torch.cuda.Event | None:
        """Copy the tensors in. On CUDA the copies are only queued: wait for the event before reading."""
        if self._views is None:
            self.touch()
        assert self._views is not None
        sources = {piece.name: _part(taken.tensors[piece.name], piece) for piece in self.share.pieces}
        on_cuda = next((tensor.device for tensor in sources.values() if tensor.is_cuda), None)
        places = {tensor.get_device() for tensor in sources.values()} if on_cuda is not None else set()
        with torch.no_grad():
            if on_cuda is not None:
                self.pin()
                self._fill_gathered(sources, on_cuda)
            self._fill_small(sources)
            if sources:
                names = list(sources)
                targets = [self._views[name] for name in names]
                torch._foreach_copy_(targets, [sources[name] for name in names], non_blocking=self.pinned)
            on_cuda = self._fill_local(taken) or on_cuda
        if on_cuda is None:
            return None
        stream = torch.cuda.current_stream(on_cuda)
        for place in places - {-1, on_cuda.index}:  # a model that lies on several GPUs
            stream.wait_stream(torch.cuda.current_stream(place))
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _fill_small(self, sources: dict[str, torch.Tensor]) -> None:
        """Small tensors of the processor: torch would wake all its threads for each of thousands of them."""
        begin = self.bytes.data_ptr() + len(self.share.head)
        for piece in self.share.pieces:
            source = sources.get(piece.name) if 0 < piece.nbytes < SMALL else None
            if source is not None and source.is_cpu and source.is_contiguous() and not source.is_complex():
                _copy(begin + piece.offset, source.data_ptr(), piece.nbytes)
                del sources[piece.name]

    def _fill_gathered(self, sources: dict[str, torch.Tensor], device: torch.device) -> None:
        if self._gathered is None:
            self._gathered = self._plan_gathering(sources, device)
        for run in self._gathered:
            torch._foreach_copy_(run.views, [sources.pop(name) for name in run.names])
            run.host.copy_(run.device, non_blocking=True)

    def _plan_gathering(self, sources: dict[str, torch.Tensor], device: torch.device) -> list[Gathered]:
        small = [
            piece for piece in self.share.pieces
            if 0 < piece.nbytes < SMALL and sources[piece.name].device == device
        ]  # fmt: skip
        runs: list[list[Piece]] = []
        for piece in small:
            last = runs[-1] if runs else None
            follows = last is not None and last[-1].offset + last[-1].nbytes == piece.offset
            if last is not None and follows and piece.offset + piece.nbytes - last[0].offset <= GATHER:
                last.append(piece)
            else:
                runs.append([piece])
        if not runs:
            return []
        longest = max(run[-1].offset + run[-1].nbytes - run[0].offset for run in runs)
        buffer = torch.empty(longest, dtype=torch.uint8, device=device)
        return [self._gather(run, buffer) for run in runs]

    def _gather(self, run: list[Piece], buffer: torch.Tensor) -> Gathered:
        first, last = run[0].offset, run[-1].offset + run[-1].nbytes
        views = []
        for piece in run:
            shape = piece.shape if piece.is_whole else (piece.stop - piece.start,)
            flat = buffer[piece.offset - first : piece.offset - first + piece.nbytes]
            views.append(flat.view(TORCH_DTYPES[piece.dtype]).view(shape))
        head = len(self.share.head)
        host = self.bytes[head + first : head + last]
        return Gathered([piece.name for piece in run], views, buffer[: last - first], host)

    def _fill_local(self, taken: Taken) -> torch.device | None:
        """Local parts of sharded tensors: staged behind the file, for another writer."""
        targets, sources = [], []
        for name, offset, nbytes in self.share.local:
            source = taken.sharded[name].to_local()
            begin = self.padded + offset
            target = self.bytes[begin : begin + nbytes].view(source.dtype).view(source.shape)
            self._locals[name] = target
            targets.append(target)
            sources.append(source)
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is not None:
            self.pin()
        if sources:
            torch._foreach_copy_(targets, sources, non_blocking=self.pinned)
        return device

    def local(self, name: str) -> torch.Tensor:
        return self._locals[name]

    def close(self) -> None:
        if self.pinned:
            _cuda().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_memory(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a Unix
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel without it: slower, not wrong
    return memory


def _view(data: torch.Tensor, piece: Piece, shape: tuple[int, ...]) -> torch.Tensor:
    flat: Any = data[piece.offset : piece.offset + piece.nbytes]
    viewed: torch.Tensor = flat.view(TORCH_DTYPES[piece.dtype]).view(shape)
    return viewed


def _part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor if piece.is_whole else tensor.reshape(-1)[piece.start : piece.stop]
