"""Batches of 0 samples, whatever a collate function returns.

In an evaluation, a rank that has no samples left still takes part in the forward passes of the
others. What an empty batch looks like follows from collating one item and the same item twice: what
grows with the number of items is continued to zero, and what stays the same is kept.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.runtime.data.seeded_dataset import PaddingItem
from paceline.runtime.data.transfer import map_fields


@dataclasses.dataclass(frozen=True)
class BatchCollate:
    """A collate function that also makes empty batches, in the process that fetches the items."""

    collate_fn: Callable[[list[Any]], Any]

    def __call__(self, items: list[Any]) -> Any:
        if len(items) == 1 and type(items[0]) is PaddingItem:
            return self.empty(items[0].item)
        return self.collate_fn(items)

    def empty(self, item: Any) -> Any:
        # a copy: collate functions may take items apart
        one = self.collate_fn([copy.deepcopy(item)])
        try:
            two = self.collate_fn([copy.deepcopy(item), copy.deepcopy(item)])
        except Exception:  # it takes a single item only
            return _empty_by_shape(one)
        try:
            empty, depends = _continue(one, two)
        except _CannotContinue as problem:
            raise _refuse(str(problem)) from problem
        if not depends:
            raise _refuse(type(one).__name__)
        return empty


@dataclasses.dataclass(frozen=True)
class ItemCollate:
    """For datasets whose items are whole batches (`batch_size=None`): converts an item, and
    collates nothing.
    """

    convert: Callable[[Any], Any]

    def __call__(self, items: list[Any]) -> Any:
        if type(items[0]) is PaddingItem:
            return self.empty(items[0].item)
        return self.convert(items[0])

    def empty(self, item: Any) -> Any:
        return _empty_by_shape(self.convert(item))


def _refuse(what: str) -> UsageError:
    return UsageError(
        f"A rank has no samples left, and run.evaluate() can't make an empty batch of {what}.",
        hint="Use a batch_size of at least twice the number of ranks, or fewer ranks than "
        "samples. Otherwise let the "
        "batches consist of tensors, lists, dictionaries, tuples and data classes.",
    )


class _CannotContinue(Exception):
    """The name of a type of which there is no empty value."""


def _continue(one: Any, two: Any) -> tuple[Any, bool]:
    """Return the value for 0 items that follows from those for 1 and 2, and whether they differ at
    all.
    """
    if type(one) is not type(two):
        raise _CannotContinue(type(one).__name__)
    if isinstance(one, torch.Tensor) or type(one).__module__ == "numpy":
        return _continue_array(one, two)
    if one is two or isinstance(one, (bool, str, bytes, type(None))):
        return one, False
    if isinstance(one, (int, float, complex)):
        return 2 * one - two, one != two
    if isinstance(one, (set, frozenset)):
        return type(one)(), bool(one)
    if isinstance(one, (list, tuple)) and len(one) != len(two):
        return one[: max(0, 2 * len(one) - len(two))], True
    return _continue_parts(one, two)


def _continue_array(one: Any, two: Any) -> tuple[Any, bool]:
    if one.ndim != two.ndim:
        raise _CannotContinue(type(one).__name__)
    sizes = [max(0, 2 * a - b) if a != b else a for a, b in zip(one.shape, two.shape, strict=True)]
    if list(one.shape) != list(two.shape):
        try:
            return one[tuple(slice(size) for size in sizes)], True
        except (RuntimeError, NotImplementedError) as error:
            raise _CannotContinue(f"a tensor of layout {one.layout}") from error
    if str(one.dtype).removeprefix("torch.").rstrip("0123456789") not in ("int", "uint"):
        return one, False
    return 2 * one - two, bool((one != two).any())


def _continue_parts(one: Any, two: Any) -> tuple[Any, bool]:
    """Continue each part of a container or an object."""
    names = list(_parts(one))
    if names != list(_parts(two)):
        raise _CannotContinue(type(one).__name__)
    first, second = _parts(one), _parts(two)
    pairs = {name: _continue(first[name], second[name]) for name in names}
    depends = any(differs for _, differs in pairs.values())
    values = {name: value for name, (value, _) in pairs.items()}
    return _rebuild(one, values), depends


def _parts(thing: Any) -> Mapping[Any, Any]:
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, (list, tuple)):
        return dict(enumerate(thing))
    if dataclasses.is_dataclass(thing):
        return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    if hasattr(thing, "__dict__") and not callable(thing):
        return dict(vars(thing))
    raise _CannotContinue(type(thing).__name__)


def _rebuild(thing: Any, values: dict[Any, Any]) -> Any:
    if type(thing) is dict:
        return values
    if isinstance(thing, tuple):
        return (
            type(thing)(*values.values()) if hasattr(thing, "_fields") else tuple(values.values())
        )
    if isinstance(thing, list):
        return list(values.values())
    rebuilt = copy.copy(thing)
    if isinstance(rebuilt, MutableMapping):
        for name, value in values.items():
            rebuilt[name] = value
    elif isinstance(rebuilt, Mapping):
        return values
    else:
        for name, value in values.items():
            object.__setattr__(rebuilt, name, value)
    return rebuilt


def _empty_by_shape(batch: Any) -> Any:
    """Empty a batch of unknown size: all its tensors of as many rows as the first, and its lists
    of values.
    """
    sizes: list[int] = []

    def note(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            sizes.extend(thing.shape[:1])
        elif isinstance(thing, (Mapping, tuple, list)) or dataclasses.is_dataclass(thing):
            for part in _parts(thing).values():
                note(part)

    note(batch)
    if not sizes:
        raise _refuse(type(batch).__name__)
    return trim(batch, sizes[0])


def trim(data: Any, samples: int) -> Any:
    """Return a batch of this many samples without any: its tensors of as many rows, and its lists
    of values.
    """
    if isinstance(data, torch.Tensor):
        return data[:0] if data.dim() and len(data) == samples else data
    if (
        isinstance(data, list)
        and data
        and not isinstance(data[0], (torch.Tensor, Mapping, tuple, list))
    ):
        return [] if len(data) == samples else data
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return map_fields(data, lambda value: trim(value, samples))
    if isinstance(data, Mapping):
        return {key: trim(value, samples) for key, value in data.items()}
    if isinstance(data, tuple):
        parts = [trim(value, samples) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    return [trim(value, samples) for value in data] if isinstance(data, list) else data
