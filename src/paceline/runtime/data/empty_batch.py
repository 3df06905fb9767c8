"""Batches of 0 samples, whatever a collate function returns.

In an evaluation, a rank that has no samples left still takes part in the forward passes of the
others. What an empty batch looks like follows from collating one item and the same item twice: what
grows with the number of items is continued to zero, and what stays the same is kept.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch

from paceline.errors import UsageError
from paceline.runtime.data.transfer import parts_of, rebuild


class PaddingKey(NamedTuple):
    """Asks for an empty batch. `key` is that of any item, which serves as the example."""

    key: Any


class PaddingItem(NamedTuple):
    """The item to make an empty batch of."""

    item: Any


@dataclasses.dataclass(frozen=True)
class BatchCollate:
    """A collate function that also makes empty batches, in the process that fetches the items."""

    collate_fn: Callable[[Any], Any]
    takes_one: bool = False  # items are whole batches: it converts one, and collates nothing

    def __call__(self, items: list[Any]) -> Any:
        if type(items[0]) is PaddingItem:
            return self.empty(items[0].item)
        return self.collate_fn(items[0] if self.takes_one else items)

    def empty(self, item: Any) -> Any:
        # a copy: collate functions may take items apart
        one = self([copy.deepcopy(item)])
        if self.takes_one:
            return _empty_by_shape(one)
        try:
            two = self.collate_fn([copy.deepcopy(item), copy.deepcopy(item)])
        except Exception:  # it takes a single item only
            return _empty_by_shape(one)
        empty, depends = _continue(one, two)
        if not depends:
            raise _refuse(type(one).__name__)
        return empty


def _refuse(what: str) -> UsageError:
    return UsageError(
        f"A rank has no samples left, and run.evaluate() can't make an empty batch of {what}.",
        hint="Use a batch_size of at least twice the number of ranks, or fewer ranks than "
        "samples. Otherwise let the batches consist of tensors, lists, dictionaries, tuples and "
        "data classes.",
    )


def _continue(one: Any, two: Any) -> tuple[Any, bool]:
    """Return the value for 0 items that follows from those for 1 and 2, and whether they differ at
    all.
    """
    if isinstance(one, torch.Tensor) or type(one).__module__ == "numpy":
        return _continue_array(one, two)
    if one is two or isinstance(one, (bool, str, bytes)):
        return one, False
    if isinstance(one, (int, float, complex)):
        return 2 * one - two, one != two
    if isinstance(one, (list, tuple)) and len(one) != len(two):
        return one[: max(0, 2 * len(one) - len(two))], True
    first, second = _parts(one), _parts(two)
    if first is None or second is None or first.keys() != second.keys():
        raise _refuse(type(one).__name__)
    depends = False
    empty = {}
    for name, value in first.items():
        empty[name], differs = _continue(value, second[name])
        depends = depends or differs
    return _rebuild(one, empty), depends


def _continue_array(one: Any, two: Any) -> tuple[Any, bool]:
    if one.shape == two.shape:
        counts = str(one.dtype).removeprefix("torch.").startswith(("int", "uint"))
        return (2 * one - two, bool((one != two).any())) if counts else (one, False)
    sizes = [max(0, 2 * a - b) if a != b else a for a, b in zip(one.shape, two.shape, strict=True)]
    return one[tuple(slice(size) for size in sizes)], True


def _empty_by_shape(batch: Any) -> Any:
    """Empty a batch of unknown size: all its tensors of as many rows as the first, and its lists
    of values.
    """
    first = _first_tensor(batch)
    if first is None:
        raise _refuse(type(batch).__name__)
    return _trim(batch, len(first))


def _first_tensor(thing: Any) -> torch.Tensor | None:
    if isinstance(thing, torch.Tensor):
        return thing if thing.dim() else None
    for part in (_parts(thing) or {}).values():
        found = _first_tensor(part)
        if found is not None:
            return found
    return None


def _trim(thing: Any, samples: int) -> Any:
    """Return a batch of this many samples without any."""
    if isinstance(thing, torch.Tensor):
        return thing[:0] if thing.dim() and len(thing) == samples else thing
    parts = _parts(thing)
    if parts is None:
        return thing
    holds_values = isinstance(thing, list) and not any(
        isinstance(each, torch.Tensor) or _parts(each) for each in thing
    )
    if holds_values and len(thing) == samples:
        return []
    return _rebuild(thing, {name: _trim(value, samples) for name, value in parts.items()})


def _parts(thing: Any) -> dict[Any, Any] | None:
    """Return what a batch consists of, or a part of it; None if it has no parts."""
    if isinstance(thing, torch.Tensor):
        return None
    parts = parts_of(thing)
    if parts is None and hasattr(thing, "__dict__") and not callable(thing):
        return dict(vars(thing))
    return parts


def _rebuild(thing: Any, values: dict[Any, Any]) -> Any:
    if parts_of(thing) is not None and not isinstance(thing, MutableMapping):
        return rebuild(thing, values)
    rebuilt = copy.copy(thing)
    if isinstance(rebuilt, MutableMapping):
        rebuilt.update(values)
    else:
        vars(rebuilt).update(values)
    return rebuilt
