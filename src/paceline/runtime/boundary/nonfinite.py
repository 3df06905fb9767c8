"""Losses that are not numbers, and memory that is not there."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from paceline.errors import NonFinite, RunError
from paceline.runtime.boundary.stop import NOTHING_BAD
from paceline.runtime.metrics.metrics import PendingScalars


class Clock(Protocol):
    """Whoever counts the steps."""

    step: int


class _Stopped:
    step = 0


class NonFiniteLossCheck:
    """Looks at every loss, but only after the fact: no step waits for the device.

    On a CPU a loss is looked at when it comes. On a device losses are copied aside and looked at one agreement
    later; a save looks at once, so that no checkpoint holds what a bad loss did.
    """

    def __init__(self, *, rank: int, on: bool) -> None:
        self.rank = rank
        self.on = on
        self.clock: Clock = _Stopped()
        self.bad: tuple[int, float] | None = None
        self._steps: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._coming: tuple[list[int], PendingScalars] | None = None

    def see(self, loss: torch.Tensor) -> None:
        if loss.is_cpu:
            value = loss.item()
            if value - value != 0 and self.bad is None:  # true of NaN and of infinities alone
                self.bad = (self.clock.step + 1, value)
        else:
            self._steps.append(self.clock.step + 1)
            self._losses.append(loss.detach().clone())

    def advance(self) -> float:
        """Look at what has arrived, send for the rest; this rank's word for the agreement."""
        self._look()
        if self._losses:
            self._coming = (self._steps, PendingScalars(self._losses))
            self._steps, self._losses = [], []
        return NOTHING_BAD if self.bad is None else -float(self.bad[0])

    def _look(self) -> None:
        if self._coming is not None:
            steps, deferred = self._coming
            self._coming = None
            for step, value in zip(steps, deferred.values(), strict=True):
                if not math.isfinite(value) and self.bad is None:
                    self.bad = (step, value)

    def look_now(self) -> None:
        """Before a save: wait for all losses, and raise if one is bad."""
        self.advance()
        self._look()
        if self.bad is not None:
            raise self._error(self.bad)

    def judge(self, minus_first_bad: float) -> None:
        """After an agreement: the rank where it began says so. The others hear of it by its end."""
        if self.bad is not None and -self.bad[0] >= minus_first_bad:
            raise self._error(self.bad)

    def _error(self, bad: tuple[int, float]) -> NonFinite:
        return NonFinite(
            f"the loss of step {bad[0]} on rank {self.rank} is {bad[1]}",
            hint="Lower the learning rate, clip gradients (run.update(opt, clip=1.0)), or use bf16 in place of fp16; "
            'session(on_nonfinite="skip") leaves such steps out.',
        )


def explain_out_of_memory(error: BaseException, *, step: int, device: torch.device) -> RunError | None:
    """The error to raise in place of CUDA's own, with sizes and three ways out; None when it is another error."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    sizes = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        sizes = (
            f": {_gib(total)} in all, {_gib(free)} free, tensors hold {_gib(held)} (at most {_gib(most)}), "
            f"{_gib(torch.cuda.memory_reserved(device) - held)} reserved beside them"
        )
    return RunError(
        f"{device} is out of memory at step {step}{sizes}",
        hint="1. A smaller slice per rank at the same global batch: run.loader(..., accumulate=2), or more ranks.\n"
        '  2. Less per sample: session(precision="bf16"), or torch.utils.checkpoint around the largest blocks.\n'
        '  3. Shared parameters and optimizer state: run.wrap(model, mode="fsdp").\n'
        f"  torch said: {str(error).splitlines()[0]}",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
