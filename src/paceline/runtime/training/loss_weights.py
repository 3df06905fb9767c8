"""The weights of losses that are sums, over samples, tokens or anything else.

The number of tokens in a step is known only after its last micro-step, and only to all ranks
together. So gradients of sums are added up as they are, and divided by the total of their weights
before the optimizer steps.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import UsageError


class LossWeights:
    """Adds up weights, separately for each turn of a step: the losses between two updates."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.turn = 0
        self._turn_has_ended = False
        self._world_size = world_size
        self._device = device
        self._own: dict[int, Any] = {}  # by turn: the total of this rank
        self._factors: dict[int, torch.Tensor] = {}
        self._means: set[int] = set()  # the turns that have losses without a weight
        self.scale = 1.0
        self.used = False  # a loss of this rank has had a weight

    def __bool__(self) -> bool:
        return bool(self._own)

    def begin_micro_step(self, *, first: bool) -> None:
        """Begin the turns of a micro-step. The same turn of all micro-steps is one sum."""
        # an update has used the losses of earlier steps
        if first and (self.turn or self._turn_has_ended):
            self._means.clear()
        self.turn, self._turn_has_ended = 0, False

    def clear(self) -> None:
        self._means.clear()
        self._own.clear()
        self._factors.clear()

    def end_turn(self) -> None:
        """End a turn, at an update. Further updates may follow that use the same losses."""
        self._turn_has_ended = True

    def begin_loss(self, weighted: bool, single: bool) -> None:
        """Note a loss. Raises UsageError if losses with and without a weight would be added up."""
        if self._turn_has_ended:
            self._turn_has_ended = False
            self.turn += 1
            if single:
                self._means.clear()
                if self._own:
                    self.clear()
        if self.turn in (self._means if weighted else self._own):
            raise UsageError(
                "Some losses of this update have a weight and others do not.",
                hint="Pass weight= with each of them: the number of samples or tokens that the "
                "loss sums over.",
            )
        if not weighted:
            self._means.add(self.turn)

    def add(self, weight: Any, *, samples: int | None) -> float:
        """Add the weight of a loss, and return the factor that the loss gets at once, the same on
        all ranks.

        If the number of samples in the global batch is known, the loss gets about as large as a
        mean: fp16 needs that.
        """
        is_number = isinstance(weight, numbers.Real) or (
            isinstance(weight, torch.Tensor) and weight.numel() == 1
        )
        if not is_number:
            raise UsageError(
                f"weight is a {type(weight).__name__}, not a number.",
                hint="Pass the number of samples or tokens that the loss sums over, such as "
                "len(y) or mask.sum().",
            )
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().reshape(())
        self.used = True
        if not self._own:
            self.scale = self._world_size / (samples or 1)
        self._own[self.turn] = self._own.get(self.turn, 0) + weight
        return self.scale

    def check_on_device(self) -> None:
        """Raise UsageError in a captured step whose weight is a number: each replay would use the
        same one.
        """
        if any(not isinstance(own, torch.Tensor) for own in self._own.values()):
            raise UsageError(
                "weight is a number in the step of run.capture, so it would be the same in every "
                "step.",
                hint="Pass a tensor on the device, such as mask.sum().",
            )

    @property
    def factor(self) -> torch.Tensor | None:
        """What makes this turn's gradients, averaged over ranks, the mean over all that the losses
        sum over.

        The first time in a turn, it is a collective. None without weights.
        """
        if self.turn not in self._own:
            return None
        if self.turn not in self._factors:
            precise = torch.float32 if self._device.type == "mps" else torch.float64
            own = self._own[self.turn]
            if isinstance(own, torch.Tensor):
                total = own.to(device=self._device, dtype=precise, copy=True)
            else:  # without a copy from the host, which would wait for the device
                total = torch.full((), own, dtype=precise, device=self._device)
            if self._world_size > 1:
                dist.all_reduce(total)
            nothing = total == 0  # every sample is masked: all gradients are zero
            self._factors[self.turn] = (
                self._world_size / self.scale / torch.where(nothing, 1, total)
            )
        return self._factors[self.turn]
