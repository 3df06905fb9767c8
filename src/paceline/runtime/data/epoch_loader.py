"""What all loaders of `run.loader` share: their position, an epoch and the steps done in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtime.data.sample_assignment import MicroBatch
from paceline.runtime.data.workers import LoaderOptions
from paceline.runtime.distributed.identity import Identity, read_identity


class EpochLoader:
    """A loader of global batches that continues in the middle of an epoch.

    A loaded position is used once by `run.steps`, and once by a plain loop.
    """

    steps_per_epoch: int | None

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        drop_last: bool = True,
        seed: int = 0,
        identity: Identity | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        # of all ranks; None if a batch sampler decides it
        self.batch_size = batch_size
        self.accumulate, self.drop_last = accumulate, drop_last
        self.seed, self.group = seed, group
        self.identity = identity if identity is not None else read_identity()
        self.device = torch.device(device) if device is not None else None
        self.options = LoaderOptions(**options)
        self.epoch = self.step = 0  # the position of the next batch
        self._resumed: Mapping[str, Any] = {}  # what was loaded, until `run.steps` uses it
        self._loaded: Mapping[str, Any] = {}  # the same, until any pass begins
        self._in_steps = False

    def first_step(self, epoch: int) -> int:
        """Return how many steps of this epoch are done."""
        return int(self._resumed["step"]) if self._resumed.get("epoch") == epoch else 0

    def forget_position(self) -> None:
        """Begin the next loop of `run.steps` at its first step: the position that was loaded is
        another loop's.
        """
        self._resumed = {}

    def micro_batches(self, epoch: int, first_step: int | None = None) -> Iterator[MicroBatch]:
        """Yield one epoch from `first_step`, which defaults to the loaded position if that is in
        this epoch.

        A step counts as taken once its last micro-batch has been yielded: save between steps.
        """
        self._check_not_in_steps()
        if first_step is not None:
            yield from self._read(epoch, first_step, {})
            return
        first_step, position = self.first_step(epoch), self._resumed
        self._resumed, self._in_steps = {}, True
        try:
            yield from self._read(epoch, first_step, position if first_step else {})
        finally:
            self._in_steps = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, for a plain loop: once, after a resume, those that
        are left of it.
        """
        self._check_not_in_steps()
        # between two epochs, a stream's state still has the positions of the last one
        position = self._loaded if self.step else {}
        if self.step and not position:
            self.epoch, self.step = self.epoch + 1, 0
        is_at_end = True  # unless a batch comes
        for micro in self._read(self.epoch, self.step, position):
            is_at_end = False
            yield micro.data
        self.epoch, self.step = self.epoch + 1, 0
        if position and is_at_end:
            yield from self

    def _check_not_in_steps(self) -> None:
        """Refuse a second iteration: it would take over the workers, and the position that is
        saved.
        """
        if self._in_steps:
            raise UsageError(
                "The loader was iterated while run.steps is still iterating over it.",
                hint="Inspect a batch before the loop, or create a second loader for it.",
            )

    def _begin(self, epoch: int, first_step: int) -> None:
        self.epoch, self.step, self._loaded = epoch, first_step, {}

    def _load_position(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self._resumed = self._loaded = dict(state)

    def _read(
        self, epoch: int, first_step: int, position: Mapping[str, Any]
    ) -> Iterator[MicroBatch]:
        """Yield an epoch from a step on. `position` is the state that was saved there, if any."""
        raise NotImplementedError
