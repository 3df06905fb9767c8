"""From a loss to a step of the optimizer: precision, accumulation, scaling, clipping; one call per optimizer."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.runtime.boundary.nonfinite import NonFiniteLossCheck
from paceline.runtime.boundary.stragglers import StragglerDetector
from paceline.runtime.training.wrap import FSDPModel, WrappedModel, Wrapper

_NOTHING = contextlib.nullcontext()
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _OptimizerInfo:
    """What is worked out once per optimizer."""

    __slots__ = ("all_of_them", "groups", "models", "parameters")

    def __init__(
        self, parameters: list[nn.Parameter], models: list[WrappedModel], *, groups: int, all_of_them: bool
    ) -> None:
        self.groups = groups  # as many as there were: `add_param_group` adds to them
        self.parameters = parameters
        self.models = models  # those that it trains
        self.all_of_them = all_of_them  # no wrapped parameter is left out: its zero_grad clears everything


class Gradients:
    """The part of a step that follows the forward. `steps` calls `begin` ahead of each forward."""

    def __init__(self, wrapper: Wrapper, *, precision: str, world_size: int, skip_nonfinite: bool) -> None:
        self.wrapper = wrapper
        self.world_size = world_size
        self.device = wrapper.device
        self.loss_check: NonFiniteLossCheck | None = None
        self.stragglers: StragglerDetector | None = None
        self.ends_steps = precision == "fp16" or world_size > 1
        self.scaler: Any = torch.amp.GradScaler(self.device.type) if precision == "fp16" else None
        self.skipped = 0
        self._dtype = LOW.get(precision)
        self._skip_nonfinite = skip_nonfinite
        self._known: dict[int, tuple[torch.optim.Optimizer, _OptimizerInfo]] = {}
        self._mean_scale = 1.0
        self._sum_scale: float | None = None
        self._count: int | None = None
        self._last = True
        self._single = True  # a step of one micro-step
        self._syncing = True
        self._stale = False  # gradients may be left that a past update did not clear
        self._stepped: list[torch.optim.Optimizer] = []

    # -- called by the loop ----------------------------------------------------------------------------

    def begin(
        self, mean_scale: float, sum_scale: float | None = None, count: int | None = None,
        *, first: bool = True, last: bool = True,
    ) -> None:  # fmt: skip
        """What this micro-step weighs, and whether the optimizer moves after it. Ahead of the forward."""
        self._mean_scale, self._sum_scale, self._count, self._last = mean_scale, sum_scale, count, last
        self._single = first and last
        if first and self._stale:
            self._clear_stale()
        if last is not self._syncing:
            self._syncing = last
            for each in self.wrapper.wrapped:
                each.set_sync(last)

    def reset(self) -> None:
        """Outside of `steps`: every backward is a whole step of its own."""
        self.begin(1.0)

    def end_step(self) -> None:
        """At the boundary: one scale for all optimizers of a step."""
        if self.scaler is not None and self._stepped:
            self.scaler.update()
            self._stepped.clear()
        if self.world_size > 1:
            for each in self.wrapper.wrapped:
                each.prepared = False

    # -- called by the script --------------------------------------------------------------------------

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward: the session's precision."""
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor, *, weight: int | None = None) -> None:
        """`loss.backward()` with scaler and accumulation. `loss` is the mean over this rank's slice.

        A mean over a short slice is weighted by the samples in it. With `weight=n` the loss is a sum over n
        samples, and is divided by the number of samples of the global batch.
        """
        if self.stragglers is not None:
            self.stragglers.mark_backward()
        if self.loss_check is not None:
            self.loss_check.record(loss)
        if self._stale and self._single:
            self._clear_stale()
        scale = self._mean_scale if weight is None else self._weighted(weight)
        if scale != 1.0:
            loss = loss * scale
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def _weighted(self, weight: Any) -> float:
        if isinstance(weight, torch.Tensor):
            raise UsageError(
                "weight is a tensor", hint="Give the number of samples as a Python number, such as len(y)."
            )
        if self._sum_scale is None:
            raise UsageError(
                "run.backward(..., weight=n) needs a loader of run.loader, which knows the global batch",
                hint="Elsewhere divide by yourself: run.backward(loss_sum * run.world_size / run.sum(n)).",
            )
        if self._count and weight != self._count:
            raise UsageError(
                f"weight={weight}, but this rank's slice has {self._count} samples",
                hint="weight counts samples. For other weights (tokens): "
                "run.backward(loss_sum * run.world_size / run.sum(tokens)).",
            )
        return self._sum_scale

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> bool:
        """Unscale, clip, step, clear the gradients; one call per optimizer. False on micro-steps that only add up."""
        known = self._known.get(id(optimizer))
        if known is None or known[0] is not optimizer or known[1].groups != len(optimizer.param_groups):
            known = self._learn(optimizer)
        if not self._last:
            return False
        parameters = known[1].parameters
        if self.world_size > 1:
            for each in known[1].models:
                each.sync_missed()
        moved = self._step(optimizer, parameters, clip)
        optimizer.zero_grad(set_to_none=True)
        self._stale = not known[1].all_of_them
        return moved

    def _step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None
    ) -> bool:
        scaler = self.scaler
        if scaler is not None:
            if optimizer in self._stepped:  # a loop without `steps`: its boundary is the second update
                scaler.update()
                self._stepped.clear()
            scaler.unscale_(optimizer)
        norm = None
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(parameters, clip)
        if scaler is not None:
            scaler.step(optimizer)
            self._stepped.append(optimizer)
            return True
        if self._skip_nonfinite and not self._finite(parameters, norm):
            self.skipped += 1
            return False
        optimizer.step()
        return True

    @staticmethod
    def _finite(parameters: list[nn.Parameter], norm: Any) -> bool:
        """The one device sync that `on_nonfinite="skip"` costs. Gradients are reduced: all ranks see the same."""
        if norm is None:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return math.isfinite(whole.item())

    def _learn(self, optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, _OptimizerInfo]:
        parameters = self.wrapper.check(optimizer)
        if self.scaler is not None and any(isinstance(each, FSDPModel) for each in self.wrapper.wrapped):
            raise UsageError(
                "precision='fp16' does not go with FSDP: its scaler cannot see all shards",
                hint="Use precision='bf16', which needs no scaler.",
            )
        own = {id(parameter) for parameter in parameters}
        others = any(id(p) not in own for p in self.wrapper.parameters() if p.requires_grad)
        models = [each for each in self.wrapper.wrapped if any(id(p) in own for p in each.model.parameters())]
        groups = len(optimizer.param_groups)
        entry = (optimizer, _OptimizerInfo(parameters, models, groups=groups, all_of_them=not others))
        self._known[id(optimizer)] = entry
        return entry

    def _clear_stale(self) -> None:
        """A new loss after an update: what an earlier loss left in other networks is not part of it.

        In a GAN the generator's loss leaves gradients in the discriminator, whose own update never asked for them.
        """
        self._stale = False
        for parameter in self.wrapper.parameters():
            parameter.grad = None
