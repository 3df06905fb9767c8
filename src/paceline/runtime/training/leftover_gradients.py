"""Gradients that a loss leaves in the parameters of other optimizers than the one it was for.

In a GAN, the generator's loss leaves gradients in the discriminator, which must not become part of
the discriminator's own. So the first backward after an update in the same step starts from zero,
and what has accumulated after an optimizer's update is dropped when the step ends. Gradients of
losses that no update has used yet stay: an optimizer that skips steps gets them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

State = dict[int, tuple[int, int]]


class LeftoverGradients:
    """Knows which parameters each loss has reached. `on` once there may be several optimizers."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        self.on = False
        self._parameters = parameters
        # the parameters of each loss that no update has used yet
        self._unused: set[frozenset[int]] = set()
        # the parameters of optimizers that were updated in this step
        self._updated: set[int] = set()
        self._has_updated = False  # since the last backward

    def state(self) -> State:
        """Return what changes in each parameter when a gradient is added."""
        grads = ((id(parameter), parameter.grad) for parameter in self._parameters())
        return {key: (id(grad), grad._version) for key, grad in grads if grad is not None}

    def begin_loss(self) -> State:
        """Drop what earlier losses of the step have left, if there was an update since. Returns
        the state.
        """
        if self._has_updated:
            self._has_updated = False
            kept = self._waiting()
            self._clear(parameter for parameter in self._parameters() if id(parameter) not in kept)
        return self.state()

    def record_loss(self, before: State) -> None:
        """Note which parameters a backward has reached, from the state before it."""
        reached = frozenset(key for key, state in self.state().items() if before.get(key) != state)
        if reached:
            self._unused.add(reached)

    def record_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that an optimizer has used the gradients of its parameters."""
        own = {id(parameter) for parameter in parameters}
        self._unused = {loss for loss in self._unused if loss.isdisjoint(own)}
        self._updated |= own
        self._has_updated = True

    def end_step(self) -> None:
        """Drop what has accumulated in parameters after the update of their optimizer."""
        if self._has_updated:
            self._has_updated = False
            dropped = self._updated - self._waiting()
            self._clear(parameter for parameter in self._parameters() if id(parameter) in dropped)
        self._updated.clear()

    def _waiting(self) -> frozenset[int]:
        """Return the parameters that losses have reached which no update has used."""
        return frozenset[int]().union(*self._unused)

    @staticmethod
    def _clear(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
