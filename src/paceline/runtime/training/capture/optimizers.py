"""Optimizers in a captured step: what a graph reads must be on the device.

A graph repeats the kernels of one step, and every Python number in that step becomes a constant of
the graph. So while the step runs, an optimizer's learning rate is a tensor, and its step counters
are on the device. Between steps the learning rate is the plain number that schedulers and
checkpoints expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.runtime.lr_scale import effective_rate
from paceline.runtime.training.capture.fused_update import CompiledUpdate, has_fused_kernel

# groups of parameters, and the values to give back
Swapped = list[tuple[dict[str, Any], dict[str, Any]]]


class GraphOptimizers:
    """The optimizers that a captured step updates. A context: while it is open, their steps can be
    captured.
    """

    def __init__(
        self, device: torch.device, *, compiles: Callable[[], bool] = lambda: False
    ) -> None:
        self.version = 0  # changes when a graph that was captured before is no longer right
        self._device = device
        self._compiles = compiles  # whether the script has its models compiled
        self._known: dict[int, _GraphOptimizer] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for each in self._known.values():
            each.give_back()  # an error has left a step half done

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        known = self._known.get(id(optimizer))
        if known is None:
            known = self._known[id(optimizer)] = _GraphOptimizer(
                optimizer, self._device, self._invalidate, compiles=self._compiles()
            )
        known.take()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._known[id(optimizer)].give_back()

    def _invalidate(self) -> None:
        self.version += 1

    def refresh(self) -> int:
        """Pass on what the script or its schedulers have changed since the last step. Returns the
        version.
        """
        for each in self._known.values():
            each.refresh()
        return self.version

    def unsupported(self) -> str | None:
        """Return why the steps of one of the optimizers cannot be captured, if so."""
        return next(
            (reason for each in self._known.values() if (reason := each.unsupported())), None
        )

    def close(self) -> None:
        for each in self._known.values():
            each.close()
        self._known.clear()


class _GraphOptimizer:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        invalidate: Any,
        *,
        compiles: bool,
    ) -> None:
        self.optimizer = optimizer
        self._compiled = CompiledUpdate.of(optimizer) if compiles else None
        self._device = device
        self._invalidate = invalidate
        # by group; None if the script's own learning rate is a tensor
        self._rates: list[torch.Tensor | None] = []
        self._values: list[float] = []  # what these tensors hold
        # the other settings of each group, constants of a graph
        self._others: list[dict[str, Any]] = []
        self._swapped: Swapped = []
        # It warns of `capturable=True` outside of a graph, which is the case in the steps before
        # the capture.
        optimizer._warned_capturable_if_run_uncaptured = True
        self._hook = optimizer.register_load_state_dict_post_hook(self._state_was_loaded)

    def close(self) -> None:
        self._hook.remove()

    def _state_was_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Notice that the state is in other tensors now."""
        self._rates = []
        self._invalidate()

    def unsupported(self) -> str | None:
        name = type(self.optimizer).__name__
        for group in self.optimizer.param_groups:
            if "capturable" not in group and not _is_fused_sgd(self.optimizer, group):
                return f"{name} has no option capturable"
            if any(not parameter.is_cuda for parameter in group["params"]):
                return f"{name} has parameters on the CPU"
        return None

    def take(self) -> None:
        """Put tensors in the place of numbers, for one step."""
        if self.unsupported() is not None:
            return
        if len(self._rates) != len(self.optimizer.param_groups):
            self._prepare()
        self.refresh()
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            settings: dict[str, Any] = {} if rate is None else {"lr": rate}
            if "capturable" in group:
                settings["capturable"] = True
            if "capturable" not in group or has_fused_kernel(self.optimizer, group):
                settings |= {"fused": True, "foreach": False}
            elif self._compiled is not None:
                settings["foreach"] = True
            self._swapped.append((group, {name: group[name] for name in settings}))
            group.update(settings)
        if self._compiled is not None:
            self._compiled.install()

    def give_back(self) -> None:
        if self._compiled is not None and self._swapped:
            self._compiled.remove()
        for group, values in self._swapped:
            group.update(values)
        self._swapped.clear()

    def _prepare(self) -> None:
        groups = self.optimizer.param_groups
        self._values = [float("nan")] * len(groups)
        self._rates = [
            None
            if isinstance(group["lr"], torch.Tensor) and group["lr"].is_cuda
            else torch.zeros((), dtype=torch.float32, device=self._device)
            for group in groups
        ]
        self._others = [_other_settings(group) for group in groups]
        for parameter, state in self.optimizer.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.is_cpu:
                state["step"] = step.to(parameter.device)

    def refresh(self) -> None:
        """Write changed learning rates to the device, and notice changes that make a graph
        wrong.
        """
        groups = self.optimizer.param_groups
        if len(self._rates) != len(groups):
            self._invalidate()
            return
        for index, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            if rate is not None:
                wanted = effective_rate(self.optimizer, float(group["lr"]))
                if wanted != self._values[index]:
                    self._values[index] = wanted
                    rate.fill_(wanted)
            for name, value in self._others[index].items():
                if group[name] is not value and group[name] != value:
                    self._others[index] = _other_settings(group)
                    self._invalidate()
                    break


def _is_fused_sgd(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return whether this is SGD, whose fused kernel takes the learning rate as a tensor."""
    return type(optimizer) is torch.optim.SGD and all(
        parameter.is_floating_point() and not parameter.is_sparse for parameter in group["params"]
    )


def _other_settings(group: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, type(None))
    left_out = ("lr", "initial_lr", "params", "capturable", "fused", "foreach")
    return {
        name: value
        for name, value in group.items()
        if name not in left_out and isinstance(value, plain)
    }
