"""Which samples a rank takes at which step: pure arithmetic, and the same global batches at every world size.

A global batch is cut micro-step by micro-step, and each micro-step by rank, in contiguous slices. So the
samples of step 17 do not depend on the number of ranks, of micro-steps or of workers, and a position
(epoch, step) is all that an exact resume needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch


class Place(Protocol):
    """Where a process stands among its ranks. The session's Identity is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...


class At(NamedTuple):
    """A place given by hand: `At(rank=1, world=4)`."""

    rank: int = 0
    world_size: int = 1


@dataclass(slots=True, eq=False)
class Slice:
    """Positions [start, stop) of the epoch's order that one rank takes in one micro-step."""

    start: int
    stop: int
    count: int  # true samples; 0 when the one position in [start, stop) is there only to keep step
    global_count: int  # true samples of the whole step: all ranks, all micro-steps
    index: int  # which micro-step of its step
    last: bool  # the optimizer moves after this one
    step: int  # which step of the epoch


@dataclass(frozen=True)
class Cut:
    """How the order of an epoch falls into steps, micro-steps and ranks."""

    samples: int
    batch_size: int
    place: Place
    accumulate: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        check_batch(self.batch_size, world_size=self.place.world_size, accumulate=self.accumulate)
        if self.steps == 0:
            raise UsageError(
                f"an epoch of {self.samples} samples has no step of batch_size={self.batch_size}",
                hint="Lower batch_size, or keep the tail with drop_last=False.",
            )

    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        if self.drop_last:
            return self.samples // self.batch_size
        return -(-self.samples // self.batch_size)

    def slices(self, first_step: int = 0) -> Iterator[Slice]:
        """This rank's slices of an epoch, in order, from a step on. Every rank gets equally many."""
        for step in range(first_step, self.steps):
            start = step * self.batch_size
            total = min(self.batch_size, self.samples - start)
            for micro in range(self.accumulate):
                left, right = part(total, micro, self.accumulate)
                low, high = part(right - left, self.place.rank, self.place.world_size)
                last = micro == self.accumulate - 1
                begin, end = start + left + low, start + left + high
                if begin == end:
                    yield Slice(start, start + 1, 0, total, micro, last, step)
                else:
                    yield Slice(begin, end, end - begin, total, micro, last, step)


def part(total: int, index: int, parts: int) -> tuple[int, int]:
    """The bounds of one of several contiguous parts, whose sizes differ by one at most."""
    return total * index // parts, total * (index + 1) // parts


def check_batch(batch_size: int, *, world_size: int, accumulate: int) -> None:
    """A global batch must fall into equal slices: otherwise the mean of means is not the mean."""
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}", hint="Give the micro-steps of one step: 1 or more.")
    unit = world_size * accumulate
    if batch_size < 1 or batch_size % unit:
        below = batch_size // unit * unit
        fits = f"{below} or {below + unit}" if below > 0 else f"{unit}"
        raise UsageError(
            f"batch_size={batch_size} cannot be cut into {world_size} ranks x {accumulate} micro-steps",
            hint=f"batch_size is global: all ranks, all micro-steps. It must be a multiple of {unit}: {fits}.",
        )


def evaluation_slices(samples: int, batch_size: int, place: Place) -> Iterator[Slice]:
    """Every sample once over all ranks, and equally many slices on every rank; the last may be empty (count 0)."""
    for step in range(evaluation_steps(samples, batch_size)):
        start = step * batch_size
        total = min(batch_size, samples - start)
        low, high = part(total, place.rank, place.world_size)
        if low == high:
            yield Slice(start, start + 1, 0, total, 0, True, step)
        else:
            yield Slice(start + low, start + high, high - low, total, 0, True, step)


def evaluation_steps(samples: int, batch_size: int) -> int:
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size}", hint="Give the samples of one forward over all ranks.")
    return -(-samples // batch_size)


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """The order in which an epoch takes its samples, from (seed, epoch) alone: the same on every rank."""
    import torch

    from paceline.runtime.data.randomness import mix

    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(samples, generator=generator)
