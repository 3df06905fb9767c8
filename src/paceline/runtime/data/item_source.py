"""Batches from a map-style data set that computes its items, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypedDict

import torch
from torch.utils.data import DataLoader

from paceline.runtime.data.randomness import SeededDataset, derive_seed, preserve_host_rng
from paceline.runtime.data.sample_assignment import Slice
from paceline.runtime.data.transfer import transfer_batches
from paceline.runtime.data.workers import WorkerInit, WorkerPool


class Source(Protocol):
    """What turns slices of an epoch into batches: an `ItemSource` or a `TensorSource`."""

    def batches(self, order: torch.Tensor, slices: Iterator[Slice], epoch: int) -> Iterator[Any]: ...

    def close(self) -> None: ...


class ItemOptions(TypedDict, total=False):
    """Options that `ItemSource` passes on to torch's DataLoader, and `augment_seeds`."""

    augment_seeds: bool
    """Seed each item from (seed, epoch, index). Without it, loading is a little faster, but augmentation depends
    on the number of workers."""
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool | None
    persistent_workers: bool | None
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float


class _BatchKeys:
    """A batch sampler that takes new keys for each epoch, so that persistent workers need no new DataLoader."""

    def __init__(self) -> None:
        self.keys: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.keys


class ItemSource:
    """Batches of items that a data set computes, in this process or in workers."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        device: torch.device | None = None,
        num_workers: int = 0,
        augment_seeds: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float = 0,
    ) -> None:
        self.seed = seed
        self.device = device
        self.num_workers = num_workers
        self.seeded: SeededDataset[Any] | None = SeededDataset(dataset, seed) if augment_seeds else None
        self._batch_keys = _BatchKeys()
        # A separate generator: otherwise the start of each epoch would draw from the one that the model uses.
        self._generator = torch.Generator()
        on_cuda = device is not None and device.type == "cuda"
        self.loader: DataLoader[Any] = DataLoader(
            self.seeded or dataset,
            batch_sampler=self._batch_keys,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=on_cuda if pin_memory is None else pin_memory,
            persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=WorkerInit(worker_init_fn) if num_workers else None,
            generator=self._generator,
            timeout=timeout,
        )
        self._workers = WorkerPool(self)

    def batches(self, order: torch.Tensor, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        self._batch_keys.keys = _keys(order, slices, epoch if self.seeded is not None else None)
        self._generator.manual_seed(derive_seed(self.seed, epoch, -1))
        iterator = iter(self.loader)
        self._workers.attach(iterator)
        seeds_this_process = self.num_workers == 0 and self.seeded is not None
        return transfer_batches(_preserve_rng(iterator) if seeds_this_process else iterator, self.device)

    def reseed(self, seed: int) -> None:
        if seed != self.seed:
            self.close()  # running workers hold the old seed
            self.seed = seed
            if self.seeded is not None:
                self.seeded.seed = seed

    def close(self) -> None:
        """Stop the workers now."""
        self._workers.shutdown()
        self.loader._iterator = None


def _keys(order: torch.Tensor, slices: Iterator[Slice], epoch: int | None) -> Iterator[list[Any]]:
    """Yield the keys of each batch: indices, or (epoch, index) pairs for a `SeededDataset`."""
    for part in slices:
        rows = order[part.start : part.stop].tolist()
        yield rows if epoch is None else [(epoch, row) for row in rows]


def _preserve_rng(batches: Iterator[Any]) -> Iterator[Any]:
    end = object()
    while True:
        with preserve_host_rng():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch
