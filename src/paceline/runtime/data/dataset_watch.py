"""Notice that a data set has changed since its workers started, so that they can be started again with it.

Persistent workers hold a copy of the data set. `dataset.epoch = 3` or `dataset.transform = ...` in the main process
would not reach them.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import torch

MAX_VISITED = 10_000  # objects; what a data set refers to beyond these is not watched
MAX_ITEMS = 1_000  # of a container; larger ones are compared by identity, length and some of their items
SAMPLED_ITEMS = 64  # of a larger one
SAMPLED_VALUES = 4_096  # of a NumPy array


class _Reference:
    """An object, compared by identity. Holding it keeps its identity from being used again."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]


class DatasetWatch:
    """Compares the attributes of a data set, and of what it refers to, with those at the last `record`.

    Numbers, text and small containers are compared by value, tensors by identity and version, and everything else by
    identity. Of large containers and NumPy arrays, it compares a sample, so a change of a few values may go unnoticed.
    Arrays in files are not read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._recorded: list[Any] | None = None

    def record(self) -> None:
        self._recorded = _describe(self._dataset)

    def has_changed(self) -> bool:
        return self._recorded is not None and self._recorded != _describe(self._dataset)


def _describe(dataset: Any) -> list[Any]:
    described: list[Any] = []
    waiting: deque[Any] = deque([dataset])
    seen: set[int] = set()
    numpy = sys.modules.get("numpy")
    while waiting and len(seen) < MAX_VISITED:
        thing = waiting.popleft()
        if isinstance(thing, (bool, int, float, complex, str, bytes, type(None))):
            described.append(repr(thing))
            continue
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            described += [_Reference(thing), -1 if thing.is_inference() else thing._version]
        elif isinstance(thing, (list, tuple, dict, set, frozenset)):
            described += [type(thing), len(thing)]
            if isinstance(thing, (set, frozenset)):
                described.append(_Reference(thing))
            elif len(thing) > MAX_ITEMS:
                described.append(_Reference(thing))
                waiting.extend(_some_items(thing))
            else:
                waiting.extend(_items(thing))
        elif numpy is not None and type(thing) is numpy.ndarray:
            described += [_Reference(thing), thing.shape, _some_values(thing)]
        else:
            described.append(_Reference(thing))
            waiting.extend(_parts(thing))
    return described


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [each for pair in container.items() for each in pair]
    return list(container)


def _some_items(container: Any) -> list[Any]:
    """Return items from all parts of a list or a tuple, or the first ones of a dictionary."""
    if isinstance(container, dict):
        return [each for pair in islice(container.items(), SAMPLED_ITEMS) for each in pair]
    return list(container[:: len(container) // SAMPLED_ITEMS])


def _some_values(array: Any) -> bytes:
    """Return the bytes of values from all parts of an array; none of one that holds objects."""
    if array.dtype.hasobject or not array.size:
        return b""
    some: bytes = array.flat[:: max(1, array.size // SAMPLED_VALUES)].tobytes()
    return some


def _parts(thing: Any) -> list[Any]:
    """Return what an object consists of: its attributes, or the values that a function has taken with it."""
    if isinstance(thing, (type, types.ModuleType)):
        return []
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        return [thing.__code__, thing.__defaults__, *cells]
    attributes = getattr(thing, "__dict__", None)
    return [attributes] if isinstance(attributes, dict) else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
