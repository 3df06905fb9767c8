"""Batches from a map-style dataset that computes its items, in this process or in workers.

Randomness belongs to the sample, not to the process that loads it: Python's, NumPy's and torch's
generators are seeded from (seed, epoch, index) before each item. Its augmentation is therefore the
same on every rank, in every worker and after a resume, and different in every epoch. Generators
that a dataset creates itself (`self.rng = ...`) are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import Dataset, Subset

from paceline.runtime.data.empty_batch import BatchCollate, PaddingItem, PaddingKey
from paceline.runtime.data.sample_assignment import Slice
from paceline.runtime.data.sample_order import EpochOrder
from paceline.runtime.data.transfer import transfer_batches
from paceline.runtime.data.workers import LoaderOptions, WorkerLoader
from paceline.runtime.randomness import derive_seed, host_state, preserve_host_rng, seed_host

T = TypeVar("T")


class Source(Protocol):
    """What turns slices of an epoch into batches: an `ItemSource` or a `TensorSource`."""

    seed: int

    def count_samples(self) -> int: ...

    def batches(self, order: EpochOrder, slices: Iterator[Slice], epoch: int) -> Iterator[Any]: ...

    def close(self) -> None: ...


class SeededDataset(Dataset[T], Generic[T]):
    """A dataset whose keys are ((seed, epoch), number, index), and whose items each have a seed of
    (seed, epoch, number).

    A dataset that fetches whole batches (`__getitems__`, as Hugging Face datasets do) is asked for
    them, unless it draws random numbers: these would depend on how batches are split. Its items are
    then fetched one by one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        inner = dataset
        while isinstance(inner, Subset):  # always has `__getitems__`, but only passes it on
            inner = inner.dataset
        self.fetches_batches = callable(getattr(inner, "__getitems__", None))

    def __getitem__(self, key: tuple[tuple[int, int], int, Any]) -> T:
        seed_and_epoch, number, index = key
        seed_host(derive_seed(*seed_and_epoch, number))
        item: T = self.dataset[index]
        return item

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        if type(keys[0]) is PaddingKey:
            return [PaddingItem(self[keys[0].key])]
        if self.fetches_batches:
            seed_and_epoch, number, _ = keys[0]
            seed_host(derive_seed(*seed_and_epoch, number))
            before = host_state()
            items: list[Any] = self.dataset.__getitems__([index for _, _, index in keys])
            if host_state() == before:
                return items
            self.fetches_batches = False
        return [self[key] for key in keys]

    def __len__(self) -> int:
        return len(self.dataset)


class _BatchKeys:
    """A batch sampler that takes new keys for each epoch."""

    def __init__(self) -> None:
        self.keys: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.keys


class ItemSource:
    """Batches of items that a dataset computes."""

    def __init__(
        self,
        dataset: Any,
        options: LoaderOptions,
        *,
        seed: int,
        rank: int,
        device: torch.device | None = None,
    ) -> None:
        self.dataset = dataset
        self.device = device
        self.options = options
        self.seed, self.rank = seed, rank
        self._keys = _BatchKeys()
        self.workers = WorkerLoader(
            self,
            SeededDataset(dataset),
            options,
            collate_fn=options.collate_fn,
            batch_sampler=self._keys,
            pin_memory=device is not None and device.type == "cuda",
        )

    def count_samples(self) -> int:
        return len(self.dataset)

    def batches(self, order: EpochOrder, slices: Iterator[Slice], epoch: int) -> Iterator[Any]:
        self._keys.keys = self._keys_of(order, slices, epoch)
        self.workers.generator.manual_seed(derive_seed(self.seed, epoch, -1, self.rank))
        batches = self.workers.begin_pass()
        if not self.options.num_workers:
            batches = _preserve_rng(batches)
        return transfer_batches(batches, self.device)

    def _keys_of(
        self, order: EpochOrder, slices: Iterator[Slice], epoch: int
    ) -> Iterator[list[Any]]:
        """Yield the keys of each batch: ((seed, epoch), number, index) of each item.

        The number is the index. A sampler may yield an index twice, so there it is the position in
        the epoch.
        """
        # empty slices become empty batches
        pads = isinstance(self.options.collate_fn, BatchCollate)
        now = (self.seed, epoch)
        for part in slices:
            rows = order.keys[part.start : part.stop]
            rows = rows.tolist() if isinstance(rows, torch.Tensor) else rows
            if pads and not part.count:
                yield [PaddingKey((now, part.start, rows[0]))]
            elif order.is_sampled:
                yield [(now, number, row) for number, row in enumerate(rows, part.start)]
            else:
                yield [(now, row, row) for row in rows]

    def close(self) -> None:
        """Stop the workers now."""
        self.workers.shutdown()


def _preserve_rng(batches: Iterator[Any]) -> Iterator[Any]:
    end = object()
    while True:
        with preserve_host_rng():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch
