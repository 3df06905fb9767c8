"""The state of the objects at one moment, small enough to keep: to return to it, and to see
whether it has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.runtime import randomness
from paceline.runtime.training.checksum import Checksum, is_comparable

MAX_COPY = 1 << 20  # bytes of tensors; larger states are not copied

LAZY = (UninitializedParameter, UninitializedBuffer)


class Snapshot:
    """Copies schedulers, learning rates, random generators and other small state.

    Weights, optimizer state and large states are not copied. Their checksum shows whether they have
    changed.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        self._rng = randomness.capture()
        self._small = _small_states(self._objects)
        self._weights = _checksum(_weights(self._objects, self._small))
        self._buffers = _checksum(_buffers(self._objects))

    def weights_changed(self) -> bool:
        """Return whether weights, optimizer state or large states differ now."""
        return self._weights.value() != _checksum(_weights(self._objects, self._small)).value()

    def has_changed(self, *, rank: int) -> bool:
        """Return whether any state but the random generators differs now. Of buffers, only rank
        0's count.
        """
        if self.weights_changed() or not _equal(self._small, _small_states(self._objects)):
            return True
        return rank == 0 and self._buffers.value() != _checksum(_buffers(self._objects)).value()

    def restore(self) -> None:
        """Return to this state, except for weights and large states."""
        for name, state in copy.deepcopy(self._small).items():
            stateful = self._objects[name]
            if isinstance(stateful, torch.optim.Optimizer):
                for group, saved in zip(stateful.param_groups, state, strict=True):
                    group.update(saved)
            else:
                stateful.load_state_dict(state)
        randomness.restore(self._rng)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body in this state, then return to the current one."""
        now = Snapshot(self._objects)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _small_states(objects: Mapping[str, Any]) -> dict[str, Any]:
    states = {}
    for name, stateful in objects.items():
        if isinstance(stateful, torch.optim.Optimizer):
            states[name] = [_without_parameters(group) for group in stateful.param_groups]
        elif not isinstance(stateful, torch.nn.Module) and not hasattr(stateful, "micro_batches"):
            state = stateful.state_dict()
            if _tensor_bytes(state) <= MAX_COPY:
                states[name] = copy.deepcopy(state)
    return states


def _weights(objects: Mapping[str, Any], small: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[Any] = []
    for name, stateful in objects.items():
        if isinstance(stateful, torch.nn.Module):
            # Not the parameters themselves: after a forward, FSDP may hold them unsharded.
            state = stateful.state_dict()
            found += [state.get(key) for key, _ in stateful.named_parameters()]
        elif isinstance(stateful, torch.optim.Optimizer):
            found += _tensors(stateful.state)
        elif name not in small and not hasattr(stateful, "micro_batches"):
            found += _tensors(stateful.state_dict())
    return [each for each in found if isinstance(each, torch.Tensor)]


def _buffers(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    modules = [each for each in objects.values() if isinstance(each, torch.nn.Module)]
    return [buffer for module in modules for buffer in module.buffers()]


def _checksum(tensors: list[Any]) -> Checksum:
    """Return the checksum of this rank's parts of the tensors."""
    known = [each for each in tensors if not isinstance(each, LAZY)]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in known]
    return Checksum(each for each in local if is_comparable(each))


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return []
    return [tensor for each in state for tensor in _tensors(each)]


def _tensor_bytes(state: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(state))


def _equal(first: Any, second: Any) -> bool:
    """Return whether two states are equal. If in doubt, they are not."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        same_kind = (
            type(first) is type(second)
            and first.shape == second.shape
            and first.dtype == second.dtype
        )
        return same_kind and bool(torch.equal(first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _equal(first[key], second[key]) for key in first
        )
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        return len(first) == len(second) and all(map(_equal, first, second))
    try:
        return bool(first == second) or repr(first) == repr(second)
    except (TypeError, ValueError, RuntimeError):
        return False
