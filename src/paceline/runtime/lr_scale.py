"""Learning rates that grow with the global batch, after a warm-up.

The rates of the optimizer's groups stay what the script and its schedulers make them. Only while
the optimizer steps are they multiplied. So schedulers and checkpoints never see the factor, and it
may differ after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import UsageError

RULES = ("linear", "sqrt")
_NAME = "_paceline_lr_scale"  # the attribute of an optimizer that has one


class LrScale:
    """The factor for the learning rates of one optimizer: `factor` after the warm-up, and `now` in
    this step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ratio: float,
        *,
        rule: str,
        warmup: int,
        step: Callable[[], int],
    ) -> None:
        if rule not in RULES:
            raise UsageError(
                f"Unknown rule {rule!r} for run.scale_lr.", hint=f"Use one of {', '.join(RULES)}."
            )
        if hasattr(optimizer, _NAME):
            raise UsageError(
                "The learning rate of this optimizer is already scaled.",
                hint="Call run.scale_lr once per optimizer.",
            )
        if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
            raise UsageError(
                "run.scale_lr needs learning rates that are numbers, not tensors.",
                hint="Pass lr as a float. run.capture works with it.",
            )
        if not isinstance(warmup, int) or warmup < 0:
            raise UsageError(
                f"warmup={warmup} is not a number of steps.", hint="Use 0 for no warm-up."
            )
        self.factor = ratio if rule == "linear" else math.sqrt(ratio)
        self.warmup = warmup
        self._step = step
        self._optimizer = optimizer
        self._rates: list[tuple[dict[str, Any], float]] = []  # while the optimizer steps
        setattr(optimizer, _NAME, self)
        optimizer.register_step_pre_hook(self._multiply)
        optimizer.register_step_post_hook(self._give_back)

    @property
    def now(self) -> float:
        """The factor in this step: 1 in the first, and `factor` from step `warmup` on, counted
        from 0.
        """
        done = self._step()
        if done >= self.warmup or self.factor <= 1.0:
            return self.factor
        return 1.0 + (self.factor - 1.0) * done / self.warmup

    @property
    def rates(self) -> list[float]:
        """The learning rates of this step, one for each group of parameters."""
        return [float(group["lr"]) * self.now for group in self._optimizer.param_groups]

    def _multiply(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._give_back()  # an error may have ended the last step half-way
        factor = self.now
        for group in optimizer.param_groups:
            # in a captured step, it is a tensor with the factor in it
            if not isinstance(group["lr"], torch.Tensor):
                self._rates.append((group, group["lr"]))
                group["lr"] *= factor

    def _give_back(self, *_: Any) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates.clear()


def effective_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Return what a group's rate becomes while the optimizer steps."""
    scale: LrScale | None = getattr(optimizer, _NAME, None)
    return rate if scale is None else rate * scale.now
