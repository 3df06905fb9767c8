"""Batches from data that is already tensors: gathered by index, without workers or collation.

With `resident=True` the tensors live on the device, and the host only computes each epoch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paceline.runtime.data.resident.batch_transform import BatchTransform
from paceline.runtime.data.sample_assignment import Slice
from paceline.runtime.data.sample_order import EpochOrder
from paceline.runtime.data.seeded_dataset import SeededDataset
from paceline.runtime.data.transfer import map_tensors, transfer_batches
from paceline.runtime.randomness import preserve_host_rng

WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")


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


def materialize(
    dataset: Any, *, seed: int, num_workers: int, options: Mapping[str, Any] | None = None
) -> Any:
    """Compute all items of a dataset once, as tensors. Every epoch then has the augmentation of
    epoch 0.
    """
    given = options or {}
    if given.get("collate_fn") is not None:
        raise UsageError(
            "resident=True doesn't work with collate_fn: the items are computed once, before "
            "there are batches.",
            hint="Use resident=False, or let the dataset return what collate_fn would.",
        )
    keys = [[(0, index, index)] for index in range(len(dataset))]
    loader: DataLoader[Any] = DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=keys,
        num_workers=num_workers,
        **{name: value for name, value in given.items() if name in WORKER_OPTIONS},
    )
    with preserve_host_rng():
        parts = list(loader)
    return _concatenate(parts)


def _concatenate(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        _require_equal_shapes(parts)
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


def _require_equal_shapes(parts: list[torch.Tensor]) -> None:
    shape = parts[0].shape[1:]
    other = next((index for index, part in enumerate(parts) if part.shape[1:] != shape), None)
    if other is not None:
        raise UsageError(
            f"resident=True needs items of equal shapes, but item 0 has {_sizes(shape)} and item "
            f"{other} has"
            f" {_sizes(parts[other].shape[1:])}.",
            hint="Use resident=False with a collate_fn that pads, or pad the items in the dataset.",
        )


def _sizes(shape: torch.Size) -> str:
    return " x ".join(map(str, shape)) or "a single value"


class TensorSource:
    """Batches by `index_select`, from tensors on the host or, if resident, on the device."""

    def __init__(
        self,
        tensors: Any,
        *,
        device: torch.device | None,
        resident: bool,
        transform: Callable[..., Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.device = device
        self.storage = device if resident and device is not None else torch.device("cpu")
        self.tensors = map_tensors(tensors, self._keep) if resident else tensors
        self.resident = resident
        self.transform = transform and BatchTransform(
            transform, self.tensors, seed=seed, device=self.storage
        )

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device. Also on the CPU: what the script does to its own tensors
        has no effect.
        """
        return tensor.to(self.storage, copy=self.storage.type == "cpu")

    def reseed(self, seed: int) -> None:
        """Take a seed from a checkpoint."""
        if self.transform:
            self.transform.reseed(seed)

    def batches(self, order: EpochOrder, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        if self.transform:
            self.transform.begin(epoch)
        if not isinstance(order.keys, torch.Tensor):
            raise UsageError(
                f"The sampler yields {type(order.keys[0]).__name__}, but rows of tensors are "
                "taken by their number.",
                hint="Let the sampler yield integers.",
            )
        selected = self._select(order.keys, slices)
        return selected if self.resident else transfer_batches(selected, self.device)

    def _select(self, order: torch.Tensor, slices: Iterator[Slice]) -> Iterator[Any]:
        if self.storage.type == "cuda":
            order = order.pin_memory().to(self.storage, non_blocking=True)
        elif self.storage.type != "cpu":
            order = order.to(self.storage)
        for part in slices:
            rows = order[part.start : part.stop]
            if self.transform:
                yield self.transform(rows)
            elif type(self.tensors) is list:  # by far the most common case, and this loop is hot
                yield [tensor.index_select(0, rows) for tensor in self.tensors]
            else:
                yield map_tensors(self.tensors, partial(torch.index_select, dim=0, index=rows))

    def close(self) -> None:
        """Do nothing: there are no workers."""
