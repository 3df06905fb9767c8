"""Batches from a map-style dataset that computes its items, in this process or in worker
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypedDict

import torch
from torch.utils.data import DataLoader

from paceline.runtime.data.dataset_watch import DatasetWatch
from paceline.runtime.data.empty_batch import BatchCollate, ItemCollate
from paceline.runtime.data.sample_assignment import Slice
from paceline.runtime.data.sample_order import EpochOrder
from paceline.runtime.data.seeded_dataset import PaddingKey, SeededDataset
from paceline.runtime.data.transfer import transfer_batches
from paceline.runtime.data.worker_lifetime import WorkerPool, make_worker_init
from paceline.runtime.randomness import derive_seed, preserve_host_rng


class Source(Protocol):
    """What turns slices of an epoch into batches: an `ItemSource` or a `TensorSource`."""

    def batches(self, order: EpochOrder, slices: Iterator[Slice], epoch: int) -> Iterator[Any]: ...

    def reseed(self, seed: int) -> None: ...

    def close(self) -> None: ...


class ItemOptions(TypedDict, total=False):
    """Options that `ItemSource` passes on to torch's DataLoader, and `augment_seeds`."""

    augment_seeds: bool
    """Seed each item from (seed, epoch, index). Without it, loading is a little faster, but
    augmentation depends on the number of workers."""
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool | None
    persistent_workers: bool | None
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], Any] | None
    multiprocessing_context: Any
    timeout: float


class _BatchKeys:
    """A batch sampler that takes new keys for each epoch, so that persistent workers need no new
    DataLoader.
    """

    def __init__(self) -> None:
        self.keys: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.keys


class ItemSource:
    """Batches of items that a dataset computes, in this process or in workers."""

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
        multiprocessing_context: Any = None,
        timeout: float = 0,
    ) -> None:
        self.seed = seed
        self.device = device
        self.num_workers = num_workers
        self.seeded: SeededDataset[Any] | None = (
            SeededDataset(dataset, seed) if augment_seeds else None
        )
        # empty slices become empty batches
        self._pads = isinstance(collate_fn, (BatchCollate, ItemCollate))
        self._batch_keys = _BatchKeys()
        # A separate generator: otherwise the start of each epoch would draw from the one that the
        # model uses.
        self._generator = torch.Generator()
        on_cuda = device is not None and device.type == "cuda"
        self.loader: DataLoader[Any] = DataLoader(
            self.seeded or dataset,
            batch_sampler=self._batch_keys,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=on_cuda if pin_memory is None else pin_memory,
            persistent_workers=num_workers > 0
            if persistent_workers is None
            else persistent_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=make_worker_init(worker_init_fn, multiprocessing_context)
            if num_workers
            else None,
            multiprocessing_context=multiprocessing_context,
            generator=self._generator,
            timeout=timeout,
        )
        self._workers = WorkerPool(self)
        self._watch = DatasetWatch(dataset)

    def batches(self, order: EpochOrder, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        self._batch_keys.keys = _keys(
            order, slices, epoch if self.seeded is not None else None, pads=self._pads
        )
        self._generator.manual_seed(derive_seed(self.seed, epoch, -1))
        iterator = self._start_pass()
        seeds_this_process = self.num_workers == 0 and self.seeded is not None
        return transfer_batches(
            _preserve_rng(iterator) if seeds_this_process else iterator, self.device
        )

    def _start_pass(self) -> Iterator[Any]:
        """Return the iterator of a new pass, by workers that know the dataset as it is now."""
        if self.is_running and self._watch.has_changed():
            self.close()
        running = self._workers.iterator
        iterator: Iterator[Any] = iter(self.loader)
        self._workers.attach(iterator)
        if self.loader.persistent_workers and iterator is not running:
            self._watch.record()
        return iterator

    @property
    def is_running(self) -> bool:
        """Whether workers are on a pass, or wait for the next one."""
        return self._workers.iterator is not None

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


def _keys(
    order: EpochOrder, slices: Iterator[Slice], epoch: int | None, *, pads: bool
) -> Iterator[list[Any]]:
    """Yield the keys of each batch: indices, or (epoch, number, index) for a `SeededDataset`.

    The number is the index. A sampler may yield an index twice, so there it is the position in the
    epoch.
    """
    for part in slices:
        rows = order.keys[part.start : part.stop]
        rows = rows.tolist() if isinstance(rows, torch.Tensor) else rows
        if pads and not part.count:
            yield [PaddingKey((epoch, part.start, rows[0]))]
        elif epoch is None:
            yield rows
        elif order.is_sampled:
            yield [(epoch, number, row) for number, row in enumerate(rows, part.start)]
        else:
            yield [(epoch, row, row) for row in rows]


def _preserve_rng(batches: Iterator[Any]) -> Iterator[Any]:
    end = object()
    while True:
        with preserve_host_rng():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch
