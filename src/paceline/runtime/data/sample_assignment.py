"""Decide which samples each rank takes at each step. Global batches are the same at every world
size.

A global batch is split by micro-step, and each micro-step by rank, into contiguous slices. The
samples of step 17 therefore don't depend on the number of ranks, micro-steps or workers, and a
position (epoch, step) is all that an exact resume needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.runtime.distributed.identity import Identity


@dataclass(slots=True, eq=False)
class Slice:
    """Positions [start, stop) of the epoch's order that one rank takes in one micro-step."""

    start: int
    stop: int
    # real samples; 0 if [start, stop) is a filler that keeps this rank in step with the others
    count: int
    global_count: int  # real samples of the whole step: all ranks, all micro-steps
    index: int  # index of the micro-step within its step
    last: bool  # whether the optimizer steps after this micro-step
    step: int  # index of the step within the epoch


@dataclass(slots=True, eq=False)
class MicroBatch:
    """One rank's data for one micro-step, on the device."""

    data: Any
    # real samples in `data`; 0 if it is a filler that keeps this rank in step with the others
    count: int
    global_count: int  # real samples of the whole step: all ranks, all micro-steps
    index: int  # index of the micro-step within its step
    last: bool  # whether the optimizer steps after this micro-step
    step: int  # index of the step within the epoch
    world_size: int

    @property
    def mean_scale(self) -> float:
        """The factor for a mean over this slice that makes gradients averaged over ranks the true
        mean.

        In a full batch it is 1 / accumulate; in a partial last batch each slice weighs what it
        holds.
        """
        return self.count * self.world_size / self.global_count


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch is split into steps, micro-steps and ranks."""

    samples: int
    batch_size: int | None
    identity: Identity
    accumulate: int = 1
    drop_last: bool = True
    sizes: tuple[int, ...] | None = None  # of the global batches, if a batch sampler decides them

    def __post_init__(self) -> None:
        if self.sizes is None:
            check_batch_size(
                self.batch_size or 0,
                world_size=self.identity.world_size,
                accumulate=self.accumulate,
            )
        else:
            check_accumulate(self.accumulate)
        if self.steps == 0 and self.sizes is not None:
            raise UsageError(
                "The batch sampler yields no batch.", hint="Let it yield at least one per epoch."
            )
        if self.steps == 0:
            raise UsageError(
                f"An epoch of {self.samples} samples has no full step of "
                f"batch_size={self.batch_size}.",
                hint="Lower batch_size, or keep the partial last batch with drop_last=False.",
            )

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        if self.sizes is not None or not self.batch_size:
            return len(self.sizes or ())
        if self.drop_last:
            return self.samples // self.batch_size
        return -(-self.samples // self.batch_size)

    def slices(self, first_step: int = 0) -> Iterator[Slice]:
        """Yield this rank's slices of an epoch, starting at a step. Every rank gets the same
        number of slices.
        """
        for step, (start, total) in enumerate(self._batches(first_step), first_step):
            for micro in range(self.accumulate):
                left, right = split_range(total, micro, self.accumulate)
                low, high = split_range(right - left, self.identity.rank, self.identity.world_size)
                last = micro == self.accumulate - 1
                begin, end = start + left + low, start + left + high
                if begin == end:
                    yield Slice(start, start + 1, 0, total, micro, last, step)
                else:
                    yield Slice(begin, end, end - begin, total, micro, last, step)

    def _batches(self, first_step: int) -> Iterator[tuple[int, int]]:
        """Yield where each global batch starts, and its number of samples."""
        if self.sizes is not None:
            starts = itertools.accumulate(self.sizes, initial=0)
            yield from itertools.islice(zip(starts, self.sizes, strict=False), first_step, None)
            return
        size = self.batch_size or 0
        for step in range(first_step, self.steps):
            yield step * size, min(size, self.samples - step * size)


def split_range(total: int, index: int, parts: int) -> tuple[int, int]:
    """Return the bounds of one of `parts` contiguous parts, whose sizes differ by at most one."""
    return total * index // parts, total * (index + 1) // parts


def check_batch_size(batch_size: int, *, world_size: int, accumulate: int) -> None:
    """Check that a global batch splits into equal slices: otherwise the mean of means isn't the
    mean.
    """
    check_accumulate(accumulate)
    unit = world_size * accumulate
    if batch_size < 1 or batch_size % unit:
        below = batch_size // unit * unit
        fits = f"{below} or {below + unit}" if below > 0 else f"{unit}"
        raise UsageError(
            f"batch_size={batch_size} can't be split evenly over {world_size} ranks x "
            f"{accumulate} micro-steps.",
            hint=f"batch_size counts all ranks and micro-steps. Use a multiple of {unit}: {fits}.",
        )


def check_accumulate(accumulate: int) -> None:
    if accumulate < 1:
        raise UsageError(
            f"accumulate={accumulate}, but a step has at least one micro-step.",
            hint="Set accumulate to 1 or more.",
        )


def evaluation_slices(samples: int, batch_size: int, identity: Identity) -> Iterator[Slice]:
    """Yield slices that cover every sample once, the same number on every rank.

    A slice is empty (count 0) only if there are fewer samples than ranks, or too few in the last
    two batches. Slices may be smaller than the batch size, but not larger, except that each rank
    takes one sample at a time at least.
    """
    if batch_size < 1:
        raise UsageError(
            f"batch_size={batch_size}, but a batch has at least one sample.",
            hint="Set batch_size to the number of samples per forward pass, over all ranks.",
        )
    ranks = identity.world_size
    size = max(batch_size, ranks)
    full, rest = divmod(samples, size)
    sizes = [size] * full + [rest] * bool(rest)
    if full and 0 < rest < ranks and size + rest >= 2 * ranks:
        sizes[-2:] = [size + rest - (size + rest) // 2, (size + rest) // 2]
    for step, (start, total) in enumerate(
        zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
    ):
        low, high = split_range(total, identity.rank, ranks)
        yield _evaluation_slice(start + low, start + high, step=step, example=start)


def evaluation_rounds(sizes: Sequence[int], identity: Identity) -> Iterator[Slice]:
    """Yield slices that give every batch of these sizes to one rank, in turn; the last ones may be
    empty (count 0).
    """
    ends = list(itertools.accumulate(sizes))
    for step, first in enumerate(range(0, len(ends), identity.world_size)):
        batch = first + identity.rank
        start, stop = (ends[batch] - sizes[batch], ends[batch]) if batch < len(ends) else (0, 0)
        yield _evaluation_slice(start, stop, step=step, example=0)


def _evaluation_slice(start: int, stop: int, *, step: int, example: int) -> Slice:
    if start == stop:
        return Slice(example, example + 1, 0, 0, 0, True, step)
    return Slice(start, stop, stop - start, stop - start, 0, True, step)
