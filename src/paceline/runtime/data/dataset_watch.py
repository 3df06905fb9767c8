"""Detect that a dataset has changed since its workers started, so that they can be restarted with
it.

Persistent workers hold a copy of the dataset. `dataset.epoch = 3` or `dataset.transform = ...` in
the main process would not reach them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import types
from collections import deque
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any

import torch
from torch.utils.data import Dataset

MAX_VISITED = 10_000  # objects; what a dataset refers to beyond these is not watched
# of a container; larger ones are compared by identity, length and some of their items
MAX_ITEMS = 1_000
SAMPLED_ITEMS = 64  # of a larger one
SAMPLED_VALUES = 4_096  # of a NumPy array, a tensor or a bytearray
MAX_TENSOR = 1_000_000  # values; of larger tensors, which may be in files, none are read
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_LIBRARIES = ("builtins", "torch", "typing", "abc", "collections")  # whose classes are not watched


class _Reference:
    """An object, compared by identity. Holding it keeps its identity from being used again."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]


class DatasetWatch:
    """Compares the attributes of a dataset, and of what it refers to, with those at the last
    `record`.

    Numbers, text, paths and small containers are compared by value, tensors by identity, version
    and some values, and everything else by identity. Of large containers and NumPy arrays, it
    compares a sample, so a change of a few values may go unnoticed. Arrays in files and in shared
    memory are not read: workers see what changes in them.
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
    waiting: deque[Any] = deque([dataset, *_class_attributes(dataset)])
    seen: set[int] = set()
    numpy = sys.modules.get("numpy")
    while waiting and len(seen) < MAX_VISITED:
        thing = waiting.popleft()
        if isinstance(thing, (*_PLAIN, PurePath)):
            described.append(repr(thing))
            continue
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            described += [
                _Reference(thing),
                -1 if thing.is_inference() else thing._version,
                _tensor_values(thing),
            ]
        elif isinstance(thing, _CONTAINERS):
            described += [type(thing), len(thing)]
            waiting.extend(_describe_container(thing, described))
        elif isinstance(thing, bytearray):
            described += [_Reference(thing), len(thing), hash(bytes(thing[:: _stride(len(thing))]))]
        elif numpy is not None and isinstance(thing, numpy.ndarray):
            described += [_Reference(thing), thing.shape]
            waiting.extend(
                [] if _is_mapped(thing, numpy) else _array_values(thing.view(numpy.ndarray))
            )
        else:
            described.append(_Reference(thing))
        if type(thing) not in _CONTAINERS and not isinstance(thing, torch.Tensor):
            waiting.extend(_parts(thing))
        if isinstance(thing, Dataset) and thing is not dataset:
            waiting.extend(_class_attributes(thing))
    return described


def _describe_container(container: Any, described: list[Any]) -> list[Any]:
    """Describe what is special about a container. Returns the items to describe next."""
    if len(container) > MAX_ITEMS:
        described.append(_Reference(container))
        return _some_items(container)
    if isinstance(container, dict):
        return [each for pair in container.items() for each in pair]
    if isinstance(container, (set, frozenset)):  # in no order
        described.append(sorted(repr(each) for each in container if isinstance(each, _PLAIN)))
        return [each for each in container if not isinstance(each, _PLAIN)]
    return list(container)


def _some_items(container: Any) -> list[Any]:
    """Return items from all parts of a list or a tuple, or the first ones of a dictionary or a
    set.
    """
    if isinstance(container, dict):
        return [each for pair in islice(container.items(), SAMPLED_ITEMS) for each in pair]
    if isinstance(container, (set, frozenset)):
        return list(islice(container, SAMPLED_ITEMS))
    return list(container[:: len(container) // SAMPLED_ITEMS])


def _stride(size: int) -> int:
    return max(1, size // SAMPLED_VALUES)


def _array_values(array: Any) -> list[Any]:
    """Return what describes the values from all parts of an array: a hash, or the objects that it
    holds.
    """
    if not array.size:
        return []
    if array.dtype == object:
        every = 1 if array.size <= MAX_ITEMS else array.size // SAMPLED_ITEMS
        return array.flat[::every].tolist()  # type: ignore[no-any-return]
    return [] if array.dtype.hasobject else [hash(array.flat[:: _stride(array.size)].tobytes())]


def _is_mapped(array: Any, numpy: Any) -> bool:
    """Return whether an array is a view of a file or of shared memory."""
    base = array
    while isinstance(base, numpy.ndarray):
        if isinstance(base, numpy.memmap):
            return True
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    return isinstance(base, mmap.mmap)


def _tensor_values(tensor: torch.Tensor) -> int:
    """Return a hash of values from all parts of a small tensor: its version does not count
    `tensor.data.fill_(1)`.
    """
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if (
        not is_plain
        or not tensor.is_cpu
        or tensor.is_quantized
        or not 0 < tensor.numel() <= MAX_TENSOR
    ):
        return 0
    if tensor.is_shared():  # type: ignore[no-untyped-call]  # with the workers, which may write to it
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    some = flat[:: _stride(flat.numel())].contiguous()
    return hash(ctypes.string_at(some.data_ptr(), some.nbytes))


def _class_attributes(thing: Any) -> list[Any]:
    """Return the plain values and containers that a dataset has as attributes of its class, with
    their names.
    """
    found: list[Any] = []
    for cls in type(thing).__mro__:
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(cls).items():
            if not name.startswith("__") and isinstance(
                value, (*_PLAIN, *_CONTAINERS, PurePath, torch.Tensor)
            ):
                found += [name, value]
    return found


def _parts(thing: Any) -> list[Any]:
    """Return what an object consists of: its attributes, or the values that a function has taken
    with it.
    """
    if isinstance(thing, (type, types.ModuleType, logging.Logger)):
        return []
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        return [thing.__code__, thing.__defaults__, *cells]
    attributes = getattr(thing, "__dict__", None)
    return [*([attributes] if isinstance(attributes, dict) else []), *_slots(thing)]


def _slots(thing: Any) -> list[Any]:
    """Return the attributes that an object has in `__slots__`, with their names."""
    found: list[Any] = []
    for cls in type(thing).__mro__:
        if "__slots__" not in vars(cls):
            continue
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found += [name, slot.__get__(thing)]
                except AttributeError:  # not set
                    continue
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
