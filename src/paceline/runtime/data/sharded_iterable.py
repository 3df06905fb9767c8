"""Split iterable datasets: each item goes to one rank and one worker.

Item i of the stream belongs to rank i mod world size, so the first batches of all ranks together
are the first items of the stream, at every world size. Each rank also reads, and skips, the items
of the others. A dataset with expensive items should split itself and be loaded with `sharded=True`;
WebDataset pipelines do that automatically.

A worker slot is the share of a rank's batches that one data-loader worker reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import IterableDataset, default_convert, get_worker_info
from torch.utils.data._utils import worker

from paceline.runtime.data.empty_batch import BatchCollate
from paceline.runtime.data.webdataset import SeededPipeline
from paceline.runtime.distributed.identity import Identity, read_identity
from paceline.runtime.randomness import derive_seed, seed_host

T = TypeVar("T")


class StreamPosition(NamedTuple):
    """How far a worker slot has read: what it takes to continue from there."""

    slot: int
    items: int  # items read from the stream, including those of other slots
    state: Any  # the dataset's own state, if it has one


class Leftover(NamedTuple):
    """The items of a slot that did not fill a batch. The leftovers of all slots are combined."""

    slot: int
    items: list[Any]


class Example(NamedTuple):
    """Any item of the stream, for ranks that have no batch: they get one that is made of it."""

    item: Any


class ShardedIterable(IterableDataset[T], Generic[T]):
    """Any iterable, split by rank and by data-loader worker. It also works with a plain DataLoader.

    The stream itself must be the same on every rank; the dataset sees no data-loader workers.
    Python's, NumPy's and torch's global generators are seeded from (seed, epoch, position) before
    each item, so a shuffle that uses them is the same everywhere.
    """

    def __init__(
        self, dataset: Iterable[T], *, identity: Identity | None = None, seed: int = 0
    ) -> None:
        self.dataset = dataset
        self.identity = identity if identity is not None else read_identity()
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if isinstance(self.dataset, SeededPipeline):
            self.dataset.seed = self.seed
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shard, shards = self.identity.rank * workers + number, self.identity.world_size * workers
        for position, item in self.stream():
            if position % shards == shard:
                yield item

    def stream(self, start: int = 0, *seeds: int) -> Iterator[tuple[int, T]]:
        """Yield all items with their positions, each with its own seed.

        Extra `seeds` tell apart streams that hold different items at the same positions, because
        the dataset splits itself.
        """
        call = _call if seeds else _call_without_workers
        seed_host(derive_seed(self.seed, self.epoch, -1, *seeds))
        items = call(iter, self.dataset)
        end = object()
        position = start
        while True:
            seed_host(derive_seed(self.seed, self.epoch, position, *seeds))
            item: Any = call(next, items, end)
            if item is end:
                return
            yield position, item
            position += 1


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _call_without_workers(function: Callable[..., Any], *args: Any) -> Any:
    """Let the dataset see no data-loader workers: if it split itself between them, items would be
    lost.
    """
    info = worker._worker_info
    worker._worker_info = None
    try:
        return function(*args)
    finally:
        worker._worker_info = info


class RankBatches(IterableDataset[Any]):
    """One rank's batches, built where the stream is read, each with the position to continue from.

    Batch k of a rank comes from slot k mod workers, as long as all slots have items. The DataLoader
    polls its workers in turn from 0, so worker 0 takes the slot whose turn is next.
    """

    def __init__(
        self,
        source: ShardedIterable[Any],
        *,
        size: int,
        sharded: bool,
        collate_fn: Callable[..., Any],
    ) -> None:
        self.source = source
        self.size = size
        self.sharded = sharded
        self.collate_fn = collate_fn
        self.first_batch = 0  # index of the rank's first batch in this pass, if slots take turns
        self.first_slot = 0  # slot of that batch
        # to continue from, by slot; empty: read from the start
        self.positions: dict[int, StreamPosition] = {}

    def __iter__(self) -> Iterator[tuple[int, Any, StreamPosition] | Leftover | Example]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        slot = (number + self.first_slot) % workers
        if self.sharded and info is not None:
            # A dataset that splits itself does so by worker id, and must see the id of its slot.
            object.__setattr__(info, "id", slot)
        saved = self.positions.get(slot)
        start = 0
        if saved is not None and saved.state is not None:
            self.source.dataset.load_state_dict(saved.state)  # type: ignore[attr-defined]
            start = saved.items
        pending: list[Any] = []
        position = start - 1
        seeds = (self.source.identity.rank, slot) if self.sharded else ()
        for position, item in self.source.stream(start, *seeds):
            if position == start:
                yield Example(item)
            if not self._belongs_to(slot, position, workers):
                continue
            pending.append(item)
            if len(pending) == self.size:
                yield len(pending), self.collate(pending), self._position_after(slot, position)
                pending = []
        if pending and self.sharded:
            yield Leftover(slot, pending)
        elif pending:
            yield len(pending), self.collate(pending), self._position_after(slot, position)

    @property
    def makes_empty(self) -> bool:
        """Whether ranks without a batch get an empty one, as in an evaluation."""
        return isinstance(self.collate_fn, BatchCollate)

    def filler(self, item: Any) -> Any:
        """Return a batch for a rank that has none left, made of any item."""
        if isinstance(self.collate_fn, BatchCollate):
            return self.collate_fn.empty(item)
        return self.collate([item])

    def collate(self, items: list[Any]) -> Any:
        return default_convert(self.collate_fn(items))  # type: ignore[no-untyped-call]

    def _belongs_to(self, slot: int, position: int, workers: int) -> bool:
        if self.sharded:
            return slot not in self.positions or position >= self.positions[slot].items
        rank, world_size = self.source.identity.rank, self.source.identity.world_size
        batch = position // world_size // self.size
        return (
            batch >= self.first_batch and position % world_size == rank and batch % workers == slot
        )

    def _position_after(self, slot: int, position: int) -> StreamPosition:
        dataset: Any = self.source.dataset
        # A copy: the stream reads on before this state is saved or sent by the worker's own thread.
        state = copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None
        return StreamPosition(slot, position + 1, state)


def is_stateful(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
