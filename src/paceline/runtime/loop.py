"""The loops of a script: `epochs`, `steps` and `evaluate`. Between two batches is the step boundary."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.runtime.console import note
from paceline.runtime.data.randomness import preserve_host_rng
from paceline.runtime.data.sample_assignment import MicroBatch
from paceline.runtime.data.transfer import transfer_batch
from paceline.runtime.step_boundary.boundary import Boundary
from paceline.runtime.training.gradients import Gradients


class Loop:
    """The current step, epoch and micro-step."""

    def __init__(
        self, boundary: Boundary, gradients: Gradients, *, device: torch.device, rank: int, max_steps: int | None
    ) -> None:
        self.step = 0  # the number of steps done, over all epochs and attempts
        self.epoch = 0
        self.begun = False
        self.micro: MicroBatch | None = None  # set while the loop's body runs
        self.weighted = False  # whether the loader counts the samples of each slice
        self.left_inside = False  # whether `step` includes one that the script left by `break` or an error
        self.counted = False  # whether a loop of `steps` has counted the steps up to here
        self.skip = 0  # batches of a plain iterable to skip after a resume
        self.check_first: Callable[[Any], None] | None = None  # called with the first batch of each loop
        self._boundary = boundary
        self._gradients = gradients
        self._device = device
        self._rank = rank
        self._max_steps = sys.maxsize if max_steps is None else max_steps
        self.in_epochs = False
        self._epoch_is_whole = True
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Prepare for the first step of this process."""
        if self.begun:
            return
        self.begun = True
        self._boundary.epoch = self.epoch
        self._boundary.before_first(self.step)

    @property
    def is_after_loop(self) -> bool:
        """Whether the body of an epoch is past its loop of `steps`, and won't enter another one for this epoch."""
        return self.in_epochs and self._boundary.epoch == self.epoch and self.counted

    @property
    def epoch_is_whole(self) -> bool:
        """Whether the epoch in progress ends with its body; not if `max_steps` ended its loop early."""
        return self._epoch_is_whole

    @property
    def is_complete(self) -> bool:
        """Whether the session's `max_steps` are done."""
        return self.step >= self._max_steps

    @property
    def current(self) -> int:
        """The step in progress, or the one in which the loop was left."""
        return self.step if self.left_inside else self.step + 1

    def epochs(self, count: int) -> Iterator[int]:
        self.in_epochs = True
        try:
            while self.epoch < count and self.step < self._max_steps:
                self._epoch_is_whole = True
                yield self.epoch
                if not self._epoch_is_whole:
                    return  # max_steps ended it early: a longer run would continue in this epoch
                self._boundary.end_epoch(self.step, epoch=self.epoch + 1)
                self.epoch += 1
        finally:
            self.in_epochs = False

    def steps(self, loader: Any, *, max_steps: int | None, accumulate: int) -> Iterator[Any]:
        micros, total, done = self._micros(loader, accumulate)
        boundary = self._boundary
        limit = self._max_steps if max_steps is None else min(self._max_steps, self.step + max_steps)
        self.left_inside = False
        plain_batches = 0 if self.weighted else accumulate
        boundary.begin_loop(epoch=self.epoch, done=done, total=total, plain_batches=plain_batches)
        try:
            if self.step < limit:
                uniform = not self.weighted and accumulate == 1
                if self.check_first is not None:
                    micros = self._checked(micros, self.check_first)
                yield from self._iterate(micros, limit, uniform)
            whole = total is not None and boundary.epoch_step >= total
            self._epoch_is_whole = whole or self.step < self._max_steps
            boundary.checkpoint_schedule.take_snapshot()
        except GeneratorExit:
            # The script left the loop by `break`: the step that it was in counts as done.
            if self.micro is not None and self.micro.last:
                self.step += 1
                boundary.epoch_step += 1
                self.left_inside = True
            boundary.checkpoint_schedule.take_snapshot()
            raise
        finally:
            self.micro, self.counted = None, True
            self._gradients.reset()
            boundary.progress.end()

    def evaluate(self, loader: Any) -> Iterator[Any]:
        self._boundary.begin_evaluation()
        for batch in loader:
            yield batch
            self._boundary.after_forward(self.step, in_a_step=self.micro is not None)

    def _iterate(self, micros: Iterator[MicroBatch], limit: int, uniform: bool) -> Iterator[Any]:
        gradients, boundary, weighted = self._gradients, self._boundary, self.weighted
        begin, after_step = gradients.begin, boundary.after_step
        for micro in micros:
            self.micro = micro
            last = micro.last
            if weighted:
                begin(micro.mean_scale, micro.global_count, micro.count, first=micro.index == 0, last=last)
            elif not uniform:
                begin(micro.mean_scale, first=micro.index == 0, last=last)
            yield micro.data
            self.micro = None
            if last:
                if gradients.ends_steps:
                    gradients.end_step()
                self.step = step = self.step + 1
                boundary.epoch_step += 1
                after_step(step)
                if step >= limit:
                    return

    @staticmethod
    def _checked(micros: Iterator[MicroBatch], check: Callable[[Any], None]) -> Iterator[MicroBatch]:
        first = next(micros, None)
        if first is not None:
            check(first.data)
            yield first
            yield from micros

    def _micros(self, loader: Any, accumulate: int) -> tuple[Iterator[MicroBatch], int | None, int]:
        """Return the micro-steps of one epoch, its number of steps, and how many of them are done."""
        self.weighted = hasattr(loader, "micro_batches")
        if not self.weighted:
            skipped, self.skip = self.skip, 0
            total = -(-len(loader) // accumulate) if hasattr(loader, "__len__") else None
            return self._plain(loader, accumulate, skipped), total, skipped // accumulate
        # Without `run.epochs`, each pass over a loader is its next epoch.
        next_epoch = self._passes[loader] + 1 if loader in self._passes else loader.epoch
        epoch = self.epoch if self.in_epochs else next_epoch
        self._passes[loader] = epoch
        done = loader.step if loader.epoch == epoch else 0
        return loader.micro_batches(epoch), loader.steps_per_epoch, done

    def _plain(self, batches: Iterable[Any], accumulate: int, skipped: int) -> Iterator[MicroBatch]:
        """Yield the batches of any iterable, with equal weights, on the device."""
        if skipped and self._rank == 0:
            note(f"skipping {skipped} batches that the run has already trained on")
        # The restored generators include what these batches drew, so skipping them must not draw again.
        with preserve_host_rng() if skipped else contextlib.nullcontext():
            iterator = iter(batches)
            for _ in range(skipped):
                next(iterator, None)
        if self._device.type != "cpu":
            iterator = (transfer_batch(data, self._device) for data in iterator)
        if accumulate == 1:
            yield from (MicroBatch(data, 1, 1, 0, True, 0, 1) for data in iterator)
            return
        index, missing = 0, object()
        upcoming = next(iterator, missing)
        while upcoming is not missing:
            data, upcoming = upcoming, next(iterator, missing)
            last = index == accumulate - 1 or upcoming is missing
            yield MicroBatch(data, 1, accumulate, index, last, 0, 1)
            index = 0 if last else index + 1
