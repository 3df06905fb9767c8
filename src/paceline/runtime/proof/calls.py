"""Calls of modules, and which of them a loss comes from.

A script calls modules for training, for evaluation, and for other things, with gradients or
without, in training mode or not. What counts is whether a gradient reaches the output of a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from paceline.runtime.proof.fingerprints import Column, row_digests
from paceline.runtime.proof.random_state import read_state

MAX_CALLS = 64  # that wait for a backward pass


class Call:
    """A call of a module, by the script itself."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        indices: list[Any] | None,
        *,
        is_training: bool,
        is_filler: bool = False,
    ) -> None:
        self.indices, self.is_training, self.is_filler = indices, is_training, is_filler
        self.rows = (
            0
            if is_filler
            else len(indices)
            if indices is not None
            else len(tensors[0])
            if tensors
            else 0
        )
        self.contents: list[list[Column]] = row_digests(tensors, self.rows)
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
        self._indices.setdefault(loader, deque(maxlen=64)).append(indices)

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
        call = Call(
            [] if is_filler else tensors, indices, is_training=is_training, is_filler=is_filler
        )
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
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)
