"""Iterable data sets as they are read: each item goes to one rank and one worker.

Item i of the stream belongs to rank i mod world; so the first batches of all ranks together are the first
items of the stream, at every world size. Each shard reads past the items of the others: a data set whose
items are costly should cut itself, and say so (`sharded=True`); WebDataset pipelines do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch.utils.data import IterableDataset, default_convert, get_worker_info

from paceline.runtime.data.batches import Place
from paceline.runtime.data.randomness import mix, seed_host
from paceline.runtime.data.webdataset import Pipeline
from paceline.runtime.distributed.identity import read_identity

T = TypeVar("T")


class Mark(NamedTuple):
    """How far one lane of a stream has come: what it takes to go on from there."""

    lane: int
    items: int  # read from the stream, those of other lanes included
    state: Any  # the data set's own state, where it has one


class Rest(NamedTuple):
    """What a lane had left at its end, less than a batch: the rests of all lanes are put together."""

    lane: int
    items: list[Any]


class ShardedIterable(IterableDataset[T], Generic[T]):
    """Any iterable, cut by rank and by data-loader worker; usable with a plain DataLoader too.

    The stream itself must be the same on every rank: each item is drawn with the generators seeded from
    (seed, epoch, position), so shuffling by Python's, NumPy's or torch's global generator is.
    """

    def __init__(self, dataset: Iterable[T], *, identity: Place | None = None, seed: int = 0) -> None:
        self.dataset = dataset
        self.place: Place = identity if identity is not None else read_identity()
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if isinstance(self.dataset, Pipeline):
            self.dataset.seed = self.seed
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shard, shards = self.place.rank * workers + worker, self.place.world_size * workers
        for position, item in self.stream():
            if position % shards == shard:
                yield item

    def stream(self, start: int = 0, *lane: int) -> Iterator[tuple[int, T]]:
        """All items with their positions, each drawn with its own randomness; `lane` tells apart streams that
        hold different items at the same positions.
        """
        seed_host(mix(self.seed, self.epoch, -1, *lane))
        items = iter(self.dataset)
        end = object()
        position = start
        while True:
            seed_host(mix(self.seed, self.epoch, position, *lane))
            item: Any = next(items, end)
            if item is end:
                return
            yield position, item
            position += 1


class Batches(IterableDataset[Any]):
    """Whole batches of one rank, made where the stream is read, each with the mark that goes on from it.

    Batch k of a rank comes from lane k mod workers, as long as all lanes last; the data loader takes workers in
    turn from 0, so lanes are counted from the one whose turn it is in this pass.
    """

    def __init__(
        self, source: ShardedIterable[Any], *, size: int, sharded: bool, collate: Callable[..., Any]
    ) -> None:
        self.source = source
        self.size = size
        self.sharded = sharded
        self.collate = collate
        self.first = 0  # number of the rank's first batch in this pass, where lanes take turns
        self.turn = 0  # whose batch that is
        self.marks: dict[int, Mark] = {}  # to go on from, by lane; else the stream is read from its start

    def __iter__(self) -> Iterator[tuple[int, Any, Mark] | Rest]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        lane = (worker + self.turn) % workers
        if self.sharded and info is not None:
            # A data set that cuts itself does so by worker: this one stands in for another.
            object.__setattr__(info, "id", lane)
        mark = self.marks.get(lane)
        start = 0
        if mark is not None and mark.state is not None:
            self.source.dataset.load_state_dict(mark.state)  # type: ignore[attr-defined]
            start = mark.items
        pending: list[Any] = []
        position = start - 1
        for position, item in self.source.stream(start, *self._salt(lane)):
            if not self._is_mine(position, lane, workers):
                continue
            pending.append(item)
            if len(pending) == self.size:
                yield len(pending), self.collated(pending), self._mark(lane, position)
                pending = []
        if pending and self.sharded:
            yield Rest(lane, pending)
        elif pending:
            yield len(pending), self.collated(pending), self._mark(lane, position)

    def example(self) -> Any:
        """Some batch of the stream, for its shape alone; None where there is nothing at all."""
        dataset: Any = self.source.dataset
        before = copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None
        for _, item in self.source.stream():
            if before is not None:
                dataset.load_state_dict(before)
            return self.collated([item])
        return None

    def collated(self, items: list[Any]) -> Any:
        return default_convert(self.collate(items))  # type: ignore[no-untyped-call]

    def _salt(self, lane: int) -> tuple[int, ...]:
        return (self.source.place.rank, lane) if self.sharded else ()

    def _is_mine(self, position: int, lane: int, workers: int) -> bool:
        if self.sharded:
            return lane not in self.marks or position >= self.marks[lane].items
        place = self.source.place
        batch = position // place.world_size // self.size
        return batch >= self.first and position % place.world_size == place.rank and batch % workers == lane

    def _mark(self, lane: int, position: int) -> Mark:
        dataset: Any = self.source.dataset
        # A copy: the stream is read on before this mark is saved, or has been sent by the worker's own thread.
        return Mark(lane, position + 1, copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None)


def is_stateful(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
