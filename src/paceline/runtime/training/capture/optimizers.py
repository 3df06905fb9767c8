"""Optimizers in a captured step: what a graph reads must be on the device.

A graph repeats the kernels of one step, and every Python number in that step becomes a constant of
the graph. So while the step runs, an optimizer's learning rate is a tensor, and its step counters
are on the device. Between steps the learning rate is the plain number that schedulers and
checkpoints expect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.runtime.lr_scale import effective_rate

# settings of a group that are no constants of a graph, or that are chosen here
_LEFT_OUT = ("lr", "initial_lr", "params", "capturable", "fused", "foreach")
# In lower precision, each operation rounds; one kernel for all of them does not, and would train
# differently.
_UNROUNDED = (torch.float32, torch.float64)


class GraphOptimizers:
    """The optimizers that a captured step updates. A context: while it is open, their steps can be
    captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        if id(optimizer) not in self._known:
            self._known[id(optimizer)] = _GraphOptimizer(optimizer, self._device)
        self._known[id(optimizer)].take()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._known[id(optimizer)].give_back()

    def refresh(self) -> list[Any]:
        """Pass on the learning rates that the script or its schedulers have changed. Returns all
        settings that are constants of a graph.
        """
        for each in self._known.values():
            each.write_rates()
        return [each.settings() for each in self._known.values()]

    def unsupported(self) -> str | None:
        """Return why the steps of one of the optimizers cannot be captured, if so."""
        return next(filter(None, (each.unsupported() for each in self._known.values())), None)

    def close(self) -> None:
        for each in self._known.values():
            each.close()
        self._known.clear()


class _GraphOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._loads = 0  # how often the state was loaded, and so is in other tensors
        # by group: the tensor that a graph reads, and the number in it; None if the script's own
        # learning rate is a tensor
        self._rates: list[tuple[torch.Tensor, float] | None] = []
        # groups of parameters, and the values to give back
        self._swapped: list[tuple[dict[str, Any], dict[str, Any]]] = []
        # It warns of `capturable=True` outside of a graph, which is the case in the steps before
        # the capture.
        optimizer._warned_capturable_if_run_uncaptured = True
        self._hook = optimizer.register_load_state_dict_post_hook(self._note_load)

    def close(self) -> None:
        self._hook.remove()

    def _note_load(self, optimizer: torch.optim.Optimizer) -> None:
        self._rates = []
        self._loads += 1

    def unsupported(self) -> str | None:
        name = type(self._optimizer).__name__
        for group in self._optimizer.param_groups:
            # SGD has a fused kernel that takes the learning rate as a tensor.
            if "capturable" not in group and type(self._optimizer) is not torch.optim.SGD:
                return f"{name} has no option capturable"
            if any(not parameter.is_cuda for parameter in group["params"]):
                return f"{name} has parameters on the CPU"
        return None

    def take(self) -> None:
        """Put tensors in the place of numbers, for one step."""
        if self.unsupported() is not None:
            return
        groups = self._optimizer.param_groups
        if len(self._rates) != len(groups):
            self._prepare()
        self.write_rates()
        for group, rate in zip(groups, self._rates, strict=True):
            settings: dict[str, Any] = {} if rate is None else {"lr": rate[0]}
            if "capturable" in group:
                settings["capturable"] = True
            if "capturable" not in group or self._has_fused_kernel(group):
                settings |= {"fused": True, "foreach": False}
            self._swapped.append((group, {name: group[name] for name in settings}))
            group.update(settings)

    def _has_fused_kernel(self, group: dict[str, Any]) -> bool:
        """Return whether torch's fused kernel may update this group: the script has not chosen
        another way.
        """
        is_adam = type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        if not is_adam or group["differentiable"]:
            return False
        is_open = group["fused"] is None and group["foreach"] is None
        return is_open and all(each.dtype in _UNROUNDED for each in group["params"])

    def give_back(self) -> None:
        for group, values in self._swapped:
            group.update(values)
        self._swapped.clear()

    def _prepare(self) -> None:
        self._rates = []
        for group in self._optimizer.param_groups:
            is_own = isinstance(group["lr"], torch.Tensor) and group["lr"].is_cuda
            rate = torch.zeros((), dtype=torch.float32, device=self._device)
            self._rates.append(None if is_own else (rate, 0.0))
        for parameter, state in self._optimizer.state.items():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.is_cpu:
                state["step"] = step.to(parameter.device)

    def write_rates(self) -> None:
        """Write changed learning rates to the device."""
        for index, group in enumerate(self._optimizer.param_groups[: len(self._rates)]):
            rate = self._rates[index]
            if rate is not None:
                wanted = effective_rate(self._optimizer, float(group["lr"]))
                if wanted != rate[1]:
                    rate[0].fill_(wanted)
                    self._rates[index] = (rate[0], wanted)

    def settings(self) -> list[Any]:
        """Return what is a constant of a graph: the groups' settings, and where the state is."""
        plain = (bool, int, float, str, tuple, type(None))
        return [
            self._loads,
            *(
                {
                    name: value
                    for name, value in group.items()
                    if name not in _LEFT_OUT and isinstance(value, plain)
                }
                for group in self._optimizer.param_groups
            ),
        ]
