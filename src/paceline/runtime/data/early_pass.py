"""Let workers load the first batch while the script still sets up, so that it waits less for that
batch.

This is opt-in: workers are copies of the process at that moment, and see no later changes. Without
workers, nothing begins early: items seed the generators of the process that computes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from paceline.runtime.data.dataset_watch import DatasetWatch


class EarlyPass:
    """At most one pass over a dataset that has begun, and that no loop has asked for yet."""

    def __init__(self, dataset: Any) -> None:
        # that the last one had before a loop asked for it; 0 if none began early
        self.seconds = 0.0
        self._watch = DatasetWatch(dataset)
        self._key: tuple[Any, ...] | None = None
        self._batches: Iterator[Any] | None = None
        self._began = 0.0

    def has_begun(self, position: tuple[Any, ...]) -> bool:
        return self._batches is not None and self._key == _key(position)

    def begin(self, position: tuple[Any, ...], start: Callable[[], Iterator[Any]]) -> None:
        """Begin a pass from this position. An error is left to the loop, which will meet it too."""
        if not torch.is_grad_enabled():  # workers are copies of this process as it is now
            return
        with suppress(Exception):
            batches, began = start(), time.perf_counter()
            # now: the start of a pass may change the dataset, as `set_epoch` does
            self._watch.record()
            self._batches, self._key, self._began = batches, _key(position), began

    def take(self, position: tuple[Any, ...], stop: Callable[[], None]) -> Iterator[Any] | None:
        """Return the pass if it has begun from this position, and the dataset is still what it was
        then.

        `stop` ends the workers of another one.
        """
        batches = self._batches
        if self.has_begun(position) and not self._watch.has_changed():
            self._batches, self.seconds = None, time.perf_counter() - self._began
            return batches
        if self.discard():
            stop()
        return None

    def discard(self) -> bool:
        """Forget the pass. Returns whether there was one, whose workers are to be stopped."""
        was_begun, self._batches = self._batches is not None, None
        return was_begun


def _key(position: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the batches of a pass depend on, with what torch would tell workers that start
    now.
    """
    return (*position, torch.get_default_dtype(), str(torch.get_default_device()))
