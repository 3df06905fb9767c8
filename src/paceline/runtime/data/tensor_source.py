"""Batches from data that is already tensors: gathered by index, without workers or collation.

With `resident=True` the tensors live on the device, and the host only computes each epoch's order.
A function of the script may then turn whole batches there into what the loop gets: crops, flips,
normalization.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.runtime.data.item_source import ItemSource
from paceline.runtime.data.sample_assignment import Slice
from paceline.runtime.data.sample_order import EpochOrder
from paceline.runtime.data.transfer import map_tensors, transfer_batches
from paceline.runtime.data.workers import LoaderOptions
from paceline.runtime.randomness import derive_seed, host_state

CHECKED_CALLS = 3  # of a transform, in which it may not draw from the global generators

# The multipliers of splitmix64, as signed numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def find_tensors(dataset: Any) -> Any:
    """Return the tensors a dataset consists of (list, tuple or mapping), or None if it computes
    its items.
    """
    if type(dataset) is TensorDataset:
        # A list with one tensor per field, as collation would return it.
        return list(dataset.tensors)
    if not isinstance(dataset, (tuple, Mapping)) or not dataset:
        return None
    values = dataset.values() if isinstance(dataset, Mapping) else dataset
    return dataset if all(isinstance(value, torch.Tensor) for value in values) else None


def count_samples(tensors: Any) -> int:
    """Return the number of samples, which must be the same in all tensors."""
    sizes: list[int] = []
    map_tensors(tensors, lambda tensor: sizes.append(len(tensor)))
    if len(set(sizes)) != 1:
        raise UsageError(
            f"The tensors of this dataset hold {' and '.join(map(str, sizes))} samples.",
            hint="Give every tensor one row per sample.",
        )
    return sizes[0]


class TensorSource:
    """Batches by `index_select`, from tensors on the host or, if resident, on the device.

    Tensors on the host are those that the dataset has when a pass begins. Resident ones are copies:
    what the script does to its own has no effect.
    """

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        *,
        device: torch.device | None,
        resident: bool = False,
        transform: Callable[..., Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self.device = device
        self.storage = device if resident and device is not None else torch.device("cpu")
        self.transform = transform and BatchTransform(transform, self.storage)
        self._dataset = dataset
        self._resident: Any = None
        if resident:
            found = find_tensors(dataset)
            tensors = _materialize(dataset, options, seed) if found is None else found
            self._resident = map_tensors(tensors, self._copy)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.storage, copy=self.storage.type == "cpu")

    @property
    def tensors(self) -> Any:
        return find_tensors(self._dataset) if self._resident is None else self._resident

    def count_samples(self) -> int:
        return count_samples(self.tensors)

    def batches(self, order: EpochOrder, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        if not isinstance(order.keys, torch.Tensor):
            raise UsageError(
                f"The sampler yields {type(order.keys[0]).__name__}, but rows of tensors are "
                "taken by their number.",
                hint="Let the sampler yield integers.",
            )
        selected = self._select(order.keys, slices, derive_seed(self.seed, epoch))
        return selected if self._resident is not None else transfer_batches(selected, self.device)

    def _select(self, order: torch.Tensor, slices: Iterator[Slice], key: int) -> Iterator[Any]:
        tensors = self.tensors
        if self.storage.type == "cuda":
            order = order.pin_memory().to(self.storage, non_blocking=True)
        elif self.storage.type != "cpu":
            order = order.to(self.storage)
        for part in slices:
            rows = order[part.start : part.stop]
            if type(tensors) is list:  # by far the most common case, and this loop is hot
                batch: Any = [tensor.index_select(0, rows) for tensor in tensors]
            else:
                batch = map_tensors(tensors, partial(torch.index_select, dim=0, index=rows))
            yield self.transform(batch, rows, key) if self.transform else batch

    def close(self) -> None:
        """Do nothing: there are no workers."""


def _materialize(dataset: Any, options: LoaderOptions, seed: int) -> Any:
    """Compute all items of a dataset once, as tensors. Every epoch then has the augmentation of
    epoch 0.
    """
    if options.collate_fn is not None:
        raise UsageError(
            "resident=True doesn't work with collate_fn: the items are computed once, before "
            "there are batches.",
            hint="Use resident=False, or let the dataset return what collate_fn would.",
        )
    source = ItemSource(dataset, replace(options, persistent_workers=False), seed=seed, rank=0)
    rows = range(len(dataset))
    slices = (Slice(row, row + 1, 1, 1, 0, True, row) for row in rows)
    return _concatenate(list(source.batches(EpochOrder(torch.tensor(rows)), slices, 0)))


def _concatenate(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return [_concatenate([part[field] for part in parts]) for field in range(len(first))]
    raise UsageError(
        "resident=True needs items of numbers and tensors, but one field is a "
        f"{type(first).__name__}.",
        hint="Use resident=False, or make every field of an item a number or a tensor.",
    )


class BatchTransform:
    """Applies a function of the script to whole batches."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function, self._device = function, device
        self._wants_random = "random" in inspect.signature(function).parameters
        self._calls = 0

    def __call__(self, batch: Any, rows: torch.Tensor, key: int) -> Any:
        """Return what the function makes of these rows. `key` is the seed of the epoch."""
        fields = (batch,) if isinstance(batch, Mapping) else batch
        random = {"random": SampleRandom(rows, key)} if self._wants_random else {}
        self._calls += 1
        if self._calls > CHECKED_CALLS:
            return self._function(*fields, **random)
        before = self._random_state()
        result = self._function(*fields, **random)
        if self._random_state() != before:
            raise UsageError(
                "The transform of run.loader uses random numbers of Python, NumPy or torch: they "
                "differ between ranks.",
                hint="Give it a parameter `random`: random(2) returns two numbers in [0, 1) for "
                "each sample.",
            )
        return result

    def _random_state(self) -> tuple[Any, ...]:
        """Return the states of all global generators that the function could use, without waiting
        for the device.
        """
        if self._device.type != "cuda":
            return host_state()
        return (*host_state(), torch.cuda.get_rng_state(self._device).numpy().tobytes())


class SampleRandom:
    """Uniform random numbers that depend on the seed, the epoch and the sample alone: `random(2)`
    has shape (batch, 2).

    So a sample gets the same numbers on any number of ranks and after a resume, on the CPU as on a
    GPU.
    """

    def __init__(self, rows: torch.Tensor, key: int) -> None:
        signed = key - (1 << 64) if key >= 1 << 63 else key
        self._samples = _mix(rows * _GOLDEN + signed)
        self._drawn = 0

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return numbers in [0, 1) of shape (batch, *shape), other ones with each call."""
        count = math.prod(shape)
        numbers = torch.arange(
            self._drawn + 1, self._drawn + count + 1, device=self._samples.device
        )
        self._drawn += count
        mixed = _mix(self._samples[:, None] + numbers * _GOLDEN)
        return (((mixed >> 40) & 0xFFFFFF).float() * 2.0**-24).view(-1, *shape)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of 64-bit numbers. Shifts of signed numbers need a mask."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))
