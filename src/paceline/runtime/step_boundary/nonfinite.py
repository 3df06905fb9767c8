"""Find losses that are NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.errors import NonFinite
from paceline.runtime.metrics.reduction import PendingScalars
from paceline.runtime.step_boundary.stop_consensus import NO_BAD_STEP


class NonFiniteLossCheck:
    """Checks every loss without making a step wait for the device.

    A loss on the CPU is checked at once. A loss on a device is copied and checked at the next
    consensus. A save checks all losses first, so that no checkpoint contains the effect of a bad
    one.
    """

    def __init__(self, *, rank: int, on: bool) -> None:
        self.rank = rank
        self.on = on
        self.counter: Any = None  # has the number of steps done as `step`
        self.bad: tuple[int, float] | None = None  # the first bad step on this rank, and its loss
        self._steps: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._pending: tuple[list[int], PendingScalars] | None = None

    def record(self, loss: torch.Tensor) -> None:
        """Note the loss of the current step."""
        if loss.is_cpu:
            value = loss.item()
            if value - value != 0 and self.bad is None:  # true only of NaN and infinities
                self.bad = (self.counter.step + 1, value)
        else:
            self._steps.append(self.counter.step + 1)
            self._losses.append(loss.detach().clone())

    def mark(self) -> int:
        return len(self._losses)

    def take_since(self, mark: int) -> list[torch.Tensor]:
        """Take back the losses that were noted since `mark`."""
        taken = self._losses[mark:]
        del self._losses[mark:], self._steps[mark:]
        return taken

    def record_copy(self, loss: torch.Tensor) -> None:
        """Note a loss on a device that nothing else changes."""
        self._steps.append(self.counter.step + 1)
        self._losses.append(loss)

    def advance(self) -> float:
        """Check the losses that have arrived and request the rest. Returns this rank's value for
        the consensus.
        """
        self._check_pending()
        if self._losses:
            self._pending = (self._steps, PendingScalars(self._losses))
            self._steps, self._losses = [], []
        return NO_BAD_STEP if self.bad is None else -float(self.bad[0])

    def _check_pending(self) -> None:
        if self._pending is not None:
            steps, losses = self._pending
            self._pending = None
            for step, value in zip(steps, losses.values(), strict=True):
                if not math.isfinite(value) and self.bad is None:
                    self.bad = (step, value)

    def settle(self) -> None:
        """Wait for all losses of this rank, so that the next consensus knows whether one is bad."""
        self.advance()
        self._check_pending()

    def check_now(self) -> None:
        """Wait for all losses of this rank. Raises NonFinite if one is bad."""
        self.settle()
        if self.bad is not None:
            raise self._error(self.bad)

    def check_consensus(self, minus_first_bad: float) -> None:
        """Raise NonFinite on the rank with the first bad loss. The other ranks end when that rank
        does.
        """
        if self.bad is not None and -self.bad[0] >= minus_first_bad:
            raise self._error(self.bad)

    def _error(self, bad: tuple[int, float]) -> NonFinite:
        return NonFinite(
            f"The loss at step {bad[0]} on rank {self.rank} is {bad[1]}.",
            hint="Lower the learning rate, clip gradients (run.update(opt, clip=1.0)), use bf16 "
            "instead of fp16, or "
            'skip such steps with session(on_nonfinite="skip").',
        )
