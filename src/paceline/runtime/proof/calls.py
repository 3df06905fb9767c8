"""Calls of modules, the samples that they got, and which of them a loss comes from.

A script calls modules for training, for evaluation, and for other things, with gradients or
without, in training mode or not. What counts is whether a gradient reaches the output of a call.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from paceline.runtime.randomness import host_state

MAX_CALLS = 64  # that wait for a backward pass
MAX_ELEMENTS = 4096  # of a row that go into its digest

Column = tuple[int, int]  # of a sample: the number of its elements, and their digest


class Call:
    """A call of a module, by the script itself."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        indices: list[Any] | None,
        *,
        is_training: bool,
        is_filler: bool,
    ) -> None:
        self.indices, self.is_training, self.is_filler = indices, is_training, is_filler
        self.rows = 0
        if indices is not None:
            self.rows = len(indices)
        elif tensors:
            self.rows = len(tensors[0])
        self.contents = row_digests(tensors, self.rows)  # None if they are not known
        self.state = read_state()
        self.has_gradient = False

    def watch(self, output: Any) -> None:
        """Learn whether a backward pass reaches the output."""
        for each in tensors_of(output):
            if each.requires_grad:
                each.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self.has_gradient = True


class PendingCalls:
    """The calls since the last backward pass, and the samples that data loaders have given."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=MAX_CALLS)
        self._indices: dict[int, deque[list[Any]]] = {}  # of batches, by loader

    def add_batch(self, loader: int, indices: list[Any]) -> None:
        self._indices.setdefault(loader, deque(maxlen=MAX_CALLS)).append(indices)

    def drop_batches(self) -> None:
        """Forget batches that were for an evaluation."""
        self._indices.clear()

    def take_batch(self) -> list[Any] | None:
        found = [queue.popleft() for queue in self._indices.values() if queue]
        return found[0] if found else None

    def add(self, args: Any, *, is_training: bool, is_filler: bool) -> Call:
        """Add a call. A filler, whose samples do not count, keeps this rank in step with others."""
        tensors = [each for each in tensors_of(args) if not each.requires_grad and each.dim()]
        # A second module of the same step must not take the batch of the next one.
        has_batch = any(each.is_training and each.indices is not None for each in self._calls)
        indices = None if has_batch else self.take_batch()
        call = Call(tensors, indices, is_training=is_training, is_filler=is_filler)
        self._calls.append(call)
        return call

    def take_trained_call(self) -> Call | None:
        """Return the call that a loss comes from, after its backward pass; None if there is
        none.
        """
        calls = list(self._calls)
        self._calls.clear()
        reached = next((each for each in calls if each.has_gradient), None)
        return reached or next((each for each in calls if each.is_training), None)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)


def read_state() -> list[Any]:
    """Return the states of the global generators: the host's, and this GPU's."""
    found: list[Any] = [*host_state()]
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_gpu and not torch.cuda.is_current_stream_capturing():
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def row_digests(tensors: list[torch.Tensor], count: int) -> list[list[Column]] | None:
    """Return the columns of each of the `count` samples of a batch: one for each tensor that has
    so many rows. None if there are no such tensors.
    """
    columns = []
    for each in tensors:
        rows = _rows(each.detach(), count)
        if rows is not None:
            columns.append([_column(row) for row in rows])
    return [list(row) for row in zip(*columns, strict=True)] or None


def _rows(tensor: torch.Tensor, count: int) -> torch.Tensor | None:
    if tensor.is_sparse or tensor.is_quantized or tensor.is_nested:
        return None
    if tensor.size(0) != count:
        if tensor.dim() < 2 or tensor.size(1) != count:
            return None
        tensor = tensor.transpose(0, 1)  # time comes first
    values = tensor.cpu()
    return values.float() if values.dtype is torch.bfloat16 else values  # NumPy has none


def _column(row: torch.Tensor) -> Column:
    flat = row.reshape(-1)
    if flat.numel() > MAX_ELEMENTS:
        flat = flat[:: -(-flat.numel() // MAX_ELEMENTS)]
    shape = zlib.crc32(repr(tuple(row.shape)).encode())
    return row.numel(), zlib.crc32(flat.contiguous().numpy().tobytes(), shape)
