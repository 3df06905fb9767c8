"""Iterable data sets: each item goes to one rank and one worker, and all ranks end an epoch together.

Item i of the stream belongs to rank i mod world; so the first batches of all ranks together are the first
items of the stream, at every world size. Each shard reads past the items of the others: a data set whose
items are costly should cut itself, and say so (`sharded=True`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.feeding import move
from paceline.runtime.identity import read_identity
from paceline.runtime.loader import Micro
from paceline.runtime.seeding import host_randomness_kept, mix, seed_host
from paceline.runtime.slicing import Place, check_batch
from paceline.runtime.workers import Crew, WorkerInit

T = TypeVar("T")


class Mark(NamedTuple):
    """How far one lane of a stream has come: what it takes to go on from there."""

    lane: int
    items: int  # read from the stream, those of other lanes included
    state: Any  # the data set's own state, where it has one


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
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shard, shards = self.place.rank * workers + worker, self.place.world * workers
        for position, item in self.stream():
            if position % shards == shard:
                yield item

    def stream(self, start: int = 0) -> Iterator[tuple[int, T]]:
        """All items with their positions, each drawn with its own randomness."""
        seed_host(mix(self.seed, self.epoch, -1))
        items = iter(self.dataset)
        end = object()
        position = start
        while True:
            seed_host(mix(self.seed, self.epoch, position))
            item: Any = next(items, end)
            if item is end:
                return
            yield position, item
            position += 1


class _Batches(IterableDataset[Any]):
    """Whole batches of one rank, made where the stream is read, each with the mark that goes on from it.

    Batch k of a rank comes from lane k mod workers; the data loader takes workers in turn from 0, so lanes
    are counted from the first batch of this pass.
    """

    def __init__(
        self, source: ShardedIterable[Any], *, size: int, sharded: bool, collate: Callable[..., Any]
    ) -> None:
        self.source = source
        self.size = size
        self.sharded = sharded
        self.collate = collate
        self.first = 0  # number of the rank's first batch in this pass
        self.marks: dict[int, Mark] = {}  # to go on from, by lane; else the stream is read from its start

    def __iter__(self) -> Iterator[tuple[int, Any, Mark]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        # One that cuts itself does so by worker.
        lane = worker if self.sharded else (worker + self.first) % workers
        mark = self.marks.get(lane)
        if mark is not None and mark.state is not None:
            self.source.dataset.load_state_dict(mark.state)  # type: ignore[attr-defined]
        start = mark.items if mark is not None else 0
        pending: list[Any] = []
        position = start - 1
        for position, item in self.source.stream(start):
            if not self._is_mine(position, lane, workers):
                continue
            pending.append(item)
            if len(pending) == self.size:
                yield len(pending), self.collate(pending), self._mark(lane, position)
                pending = []
        if pending:
            yield len(pending), self.collate(pending), self._mark(lane, position)

    def _is_mine(self, position: int, lane: int, workers: int) -> bool:
        if self.sharded:
            # Every item is: lanes take turns with whole batches, and those before the first were had.
            return position // self.size * workers + lane >= self.first
        place = self.source.place
        batch = position // place.world // self.size
        return batch >= self.first and position % place.world == place.rank and batch % workers == lane

    def _mark(self, lane: int, position: int) -> Mark:
        dataset: Any = self.source.dataset
        # A copy: the stream is read on before this mark is saved, or has been sent by the worker's own thread.
        return Mark(lane, position + 1, copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None)


def is_stateful(dataset: Any) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


class StreamLoader:
    """Batches of an iterable data set. `batch_size` is global; an epoch ends on all ranks at the same step.

    With `drop_last` the epoch ends with the last step that is full on every rank. Otherwise it ends when no
    rank has a sample left, and a rank that has none repeats its last batch, which counts for nothing.
    """

    steps_per_epoch: int | None = None

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        accumulate: int = 1,
        drop_last: bool = True,
        sharded: bool = False,
        seed: int = 0,
        identity: Place | None = None,
        device: torch.device | str | None = None,
        group: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        place: Place = identity if identity is not None else read_identity()
        check_batch(batch_size, world=place.world, accumulate=accumulate)
        self.dataset = dataset
        self.batch_size, self.accumulate, self.drop_last = batch_size, accumulate, drop_last
        self.place, self.seed, self.group, self.num_workers = place, seed, group, num_workers
        self.device = torch.device(device) if device is not None else None
        inner = dataset.dataset if isinstance(dataset, ShardedIterable) else dataset
        self._batches = _Batches(
            ShardedIterable(inner, identity=place, seed=seed),
            size=batch_size // (place.world * accumulate),
            sharded=sharded,
            collate=collate_fn or default_collate,
        )
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=WorkerInit(worker_init_fn) if num_workers else None,
            generator=torch.Generator(),  # its own: the model's must not be drawn from
        )
        self._crew = Crew(self)
        self._say = say or (_say_on_rank_zero if place.rank == 0 else _say_nothing)
        self._spare: Any = None  # what a rank repeats when it has nothing left
        self.epoch = self.step = 0
        self._marks: dict[int, Mark] = {}
        self._resumed: tuple[int, int, dict[int, Mark]] | None = None

    def micro_batches(self, epoch: int, first_step: int | None = None) -> Iterator[Micro]:
        """One epoch from a step on; by default from where a loaded state stood, if that was in this epoch."""
        marks: dict[int, Mark] = {}
        if first_step is None and self._resumed is not None and self._resumed[0] == epoch:
            first_step, marks = self._resumed[1:]
        self._resumed = None
        first_step = first_step or 0
        if first_step and not marks:
            self._say(
                f"the data set keeps no position: skipping {first_step * self.batch_size} items "
                f"to step {first_step} of epoch {epoch}"
            )
        self.epoch, self.step, self._marks = epoch, first_step, dict(marks)
        batches = self._open(epoch, first_step, marks)
        step = self._gather(batches)
        total = self._agree(step)
        while (count := total()) > 0:
            # The next step is fetched, and asked about, before this one is handed out: the answer is there in time.
            upcoming = self._gather(batches)
            total = self._agree(upcoming)
            yield from self._handed_out(step, count)
            step = upcoming

    def _open(self, epoch: int, first_step: int, marks: dict[int, Mark]) -> Iterator[Any]:
        source = self._batches
        source.source.set_epoch(epoch)
        source.first = first_step * self.accumulate
        source.marks = marks
        iterator = iter(self._loader)
        self._crew.engage(iterator)
        return iterator

    def _gather(self, batches: Iterator[Any]) -> list[tuple[int, Any, Mark | None]]:
        """One step's micro-batches; those that are not there any more repeat the last one and count nothing."""
        step: list[tuple[int, Any, Mark | None]] = []
        for _ in range(self.accumulate):
            with host_randomness_kept():
                found = next(batches, None)
            if found is None:
                step.append((0, self._spare, None))
            else:
                count, data, mark = found
                data = move(data, self.device)
                self._spare = data
                step.append((count, data, mark))
        return step

    def _agree(self, step: list[tuple[int, Any, Mark | None]]) -> Callable[[], int]:
        """Start to count this step's samples over all ranks; the answer, when asked for: 0 ends the epoch."""
        mine = sum(count for count, _, _ in step)
        barren = int(self._spare is None)
        if self.place.world == 1:
            return lambda: self._verdict(mine, barren)
        if not dist.is_initialized():
            raise UsageError(
                f"{self.place.world} ranks read a stream, but there is no process group to agree on its end",
                hint="Make the loader inside paceline.session(), or after torch.distributed.init_process_group().",
            )
        on_device = dist.get_backend(self.group) in ("nccl", "xccl")
        sums = torch.tensor([mine, barren], device=self.device if on_device else "cpu")
        work = dist.all_reduce(sums, group=self.group, async_op=True)

        def answer() -> int:
            work.wait()
            return self._verdict(*sums.tolist())

        return answer

    def _verdict(self, total: int, barren: int) -> int:
        if total < self.batch_size and self.drop_last:
            return 0
        if total and barren:
            raise UsageError(
                f"{barren} of {self.place.world} ranks got no item at all from the data set",
                hint="It holds fewer items than there are ranks: use fewer ranks, or drop_last=True.",
            )
        return total

    def _handed_out(self, step: list[tuple[int, Any, Mark | None]], total: int) -> Iterator[Micro]:
        number = self.step
        for index, (count, data, mark) in enumerate(step):
            if mark is not None:
                self._marks[mark.lane] = mark
            last = index == self.accumulate - 1
            if last:
                self.step = number + 1
            yield Micro(data, count, total, index, last, number, self.place.world)

    def __iter__(self) -> Iterator[Any]:
        """For a plain loop: the batches of one epoch, then of the next."""
        for micro in self.micro_batches(self.epoch):
            yield micro.data
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world": self.place.world,
            "num_workers": self.num_workers,
            "marks": [tuple(mark) for mark in self._marks.values()] if is_stateful(self._inner) else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["step"] and state["batch_size"] != self.batch_size:
            raise CheckpointError(
                f"the checkpoint stands in the midst of an epoch with batch_size={state['batch_size']}; "
                f"now it is {self.batch_size}",
                hint=f"Resume with batch_size={state['batch_size']}, or start a new run from these weights.",
            )
        same = state["world"] == self.place.world and state["num_workers"] == self.num_workers
        marks = {mark[0]: Mark(*mark) for mark in state["marks"]} if same and is_stateful(self._inner) else {}
        self.seed = self._batches.source.seed = int(state["seed"])
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self._resumed = (self.epoch, self.step, marks)

    @property
    def _inner(self) -> Any:
        return self._batches.source.dataset

    def close(self) -> None:
        self._crew.dismiss()


def _say_on_rank_zero(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
