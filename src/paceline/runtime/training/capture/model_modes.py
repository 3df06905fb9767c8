"""What a graph depends on in the models: their modules, and what `train()`, `eval()` and
`requires_grad_` set.

This is read before every step, so it goes through lists that were made once, without a loop in
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_not
from typing import Any

from torch import nn

_END = object()
_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")


class ModelModes:
    """The modes of some models and all of their modules, which the script may change between
    steps.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._count = len(models)
        self._modules = [module for model in models for module in model.modules()]
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        # dictionaries that change in place
        children: list[Any] = [module._modules for module in self._modules]
        self._filled = [each for each in children if each]
        self._empty = [each for each in children if not each]
        self._children = (*self._children_now(), _END)

    def has_changed(self, count: int) -> bool:
        """Return whether there are more models, or one of them has other modules than before."""
        if count != self._count or any(self._empty):
            return True
        return any(map(is_not, chain(self._children_now(), (_END,)), self._children))

    def key(self) -> tuple[Any, ...]:
        """Return the modes of all parameters and modules."""
        return bytes(map(_requires_grad, self._parameters)), tuple(map(_training, self._modules))

    def _children_now(self) -> chain[Any]:
        return chain.from_iterable(map(dict.values, self._filled))
