"""Data that is already tensors: batches are gathered by index, with no worker and no collating.

With `resident=True` the tensors live on the device, and an epoch needs no work of the host beyond its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.errors import UsageError
from paceline.runtime.data.batches import Slice
from paceline.runtime.data.randomness import Seeded, host_randomness_kept
from paceline.runtime.data.transfer import feed, map_tensors


def tensors_of(dataset: Any) -> Any:
    """The tensors that a data set consists of (list, tuple or mapping, samples first), or None if it computes."""
    if type(dataset) is TensorDataset:
        # As collating would give them: a list, one tensor for each field.
        return list(dataset.tensors)
    if not isinstance(dataset, (tuple, Mapping)) or not dataset:
        return None
    values = dataset.values() if isinstance(dataset, Mapping) else dataset
    return dataset if all(isinstance(each, torch.Tensor) for each in values) else None


def samples_in(tensors: Any) -> int:
    """How many samples tensors hold, all alike."""
    sizes: list[int] = []
    map_tensors(tensors, lambda each: sizes.append(len(each)))
    if len(set(sizes)) != 1:
        raise UsageError(
            f"the tensors of one data set hold {' and '.join(map(str, sizes))} samples",
            hint="Each must hold one row per sample.",
        )
    return sizes[0]


def materialised(dataset: Dataset[Any], *, seed: int, num_workers: int) -> Any:
    """All items of a data set as tensors, made once: its augmentation is that of epoch 0, in every epoch."""
    keys = [[(0, index)] for index in range(_length(dataset))]
    loader: DataLoader[Any] = DataLoader(Seeded(dataset, seed), batch_sampler=keys, num_workers=num_workers)
    with host_randomness_kept():
        parts = list(loader)
    return _joined(parts)


def _length(dataset: Any) -> int:
    return len(dataset)


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return [_joined([part[field] for part in parts]) for field in range(len(first))]
    raise UsageError(
        f"items with a field of type {type(first).__name__} cannot be kept on the device",
        hint="Use resident=False, or make every field of an item a number or a tensor.",
    )


class TensorSource:
    """Batches by `index_select`, from tensors on the host or, resident, on the device."""

    def __init__(self, tensors: Any, *, device: torch.device | None, resident: bool) -> None:
        self.device = device
        self.home = device if resident and device is not None else torch.device("cpu")
        self.tensors = map_tensors(tensors, lambda each: each.to(self.home)) if resident else tensors
        self.resident = resident

    def batches(self, order: torch.Tensor, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        del epoch  # nothing is computed, so nothing is random
        gathered = self._gathered(order, slices)
        return gathered if self.resident else feed(gathered, self.device)

    def _gathered(self, order: torch.Tensor, slices: Iterator[Slice]) -> Iterator[Any]:
        if self.home.type == "cuda":
            order = order.pin_memory().to(self.home, non_blocking=True)
        elif self.home.type != "cpu":
            order = order.to(self.home)
        for each in slices:
            rows = order[each.start : each.stop]
            if type(self.tensors) is list:  # by far the most frequent case, and the loop is hot
                yield [tensor.index_select(0, rows) for tensor in self.tensors]
            else:
                yield map_tensors(self.tensors, partial(torch.index_select, dim=0, index=rows))

    def close(self) -> None:
        """Nothing to end."""
