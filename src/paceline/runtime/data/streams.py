"""The loader of streams: a global batch size, and all ranks end an epoch together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.batches import Place, check_batch
from paceline.runtime.data.loader import Micro
from paceline.runtime.data.randomness import host_randomness_kept
from paceline.runtime.data.sharded_iterable import Batches, Mark, Rest, ShardedIterable, is_stateful
from paceline.runtime.data.transfer import move
from paceline.runtime.data.webdataset import Pipeline, is_pipeline, refuse_mix
from paceline.runtime.data.workers import Crew, WorkerInit
from paceline.runtime.distributed.identity import read_identity

Portion = tuple[int, Any, Mark | None]  # how many samples, the batch, and what goes on from it


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
        check_batch(batch_size, world_size=place.world_size, accumulate=accumulate)
        self.dataset = dataset
        self.batch_size, self.accumulate, self.drop_last = batch_size, accumulate, drop_last
        self.place, self.seed, self.group, self.num_workers = place, seed, group, num_workers
        self.device = torch.device(device) if device is not None else None
        self._say = say or (_say_on_rank_zero if place.rank == 0 else _say_nothing)
        inner = dataset.dataset if isinstance(dataset, ShardedIterable) else dataset
        if is_pipeline(inner):
            inner = Pipeline(inner, place=place, workers=num_workers, say=self._say)
            sharded = inner.splits
        elif not sharded:
            refuse_mix(inner)
        self.sharded = sharded
        self._batches = Batches(
            ShardedIterable(inner, identity=place, seed=seed),
            size=batch_size // (place.world_size * accumulate),
            sharded=sharded,
            collate=collate_fn or default_collate,
        )
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=WorkerInit(worker_init_fn) if num_workers else None,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # its own: the model's must not be drawn from
        )
        self._crew = Crew(self)
        self._spare: Any = None  # what a rank repeats when it has nothing left
        self.epoch = self.step = 0
        self._marks: dict[int, Mark] = {}
        self._turn = 0  # the lane that the next batch comes from
        self._rest = 0  # items of the lanes' rests that were handed out
        self._resumed: Mapping[str, Any] | None = None

    def micro_batches(self, epoch: int, first_step: int | None = None) -> Iterator[Micro]:
        """One epoch from a step on; by default from where a loaded state stood, if that was in this epoch."""
        resumed, self._resumed = self._resumed, None
        if first_step is not None or resumed is None or resumed["epoch"] != epoch:
            resumed = {}
        self.epoch, self.step = epoch, first_step or resumed.get("step", 0)
        self._go_on_from(resumed)
        batches = self._assembled(self._open())
        step = self._gather(batches)
        total = self._agree(step)
        while (count := total()) > 0:
            # The next step is fetched, and asked about, before this one is handed out: the answer is there in time.
            upcoming = self._gather(batches)
            total = self._agree(upcoming)
            yield from self._handed_out(step, count)
            step = upcoming

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        """Take the lanes' marks from a state, where they fit; otherwise batches are counted from the start."""
        lanes = max(1, self.num_workers)
        self._marks, self._rest = {}, 0
        self._turn = self.step * self.accumulate % lanes
        same = state and (state["world_size"], state["num_workers"]) == (
            self.place.world_size,
            self.num_workers,
        )
        # Lanes too short for a batch of their own leave no mark: what they gave is counted by `rest`.
        if same and self._keeps_marks and (state["marks"] or state.get("rest")):
            self._marks = {mark[0]: Mark(*mark) for mark in state["marks"]}
            self._turn, self._rest = state.get("turn", self._turn), state.get("rest", 0)
        elif self.sharded:
            # As many batches of each lane as if they had taken turns; the next save is to know of them, too.
            had = {lane: -(-(self.step * self.accumulate - lane) // lanes) for lane in range(lanes)}
            size = self._batches.size
            self._marks = {lane: Mark(lane, count * size, None) for lane, count in had.items() if count > 0}
        if not self.step:
            return
        if state and self.sharded and not same:
            self._say(
                f"{state['world_size']} ranks with {state['num_workers']} workers read this epoch so far, now "
                f"{self.place.world_size} with {self.num_workers}: the stream is cut otherwise, and some samples of "
                "the epoch come twice or not at all"
            )
        if not any(mark.state is not None for mark in self._marks.values()):
            self._say(
                f"the data set keeps no position: skipping {self.step * self.batch_size} items "
                f"to step {self.step} of epoch {self.epoch}"
            )

    def _open(self) -> Iterator[Any]:
        source = self._batches
        source.source.set_epoch(self.epoch)
        source.first, source.turn = self.step * self.accumulate, self._turn
        source.marks = dict(self._marks)
        iterator = iter(self._loader)
        self._crew.engage(iterator)
        return iterator

    def _assembled(self, found: Iterator[Any]) -> Iterator[Portion]:
        """Full batches of all lanes, and at their end their rests, put together to batches."""
        rests: list[Rest] = []
        for each in found:
            if isinstance(each, Rest):
                rests.append(each)
            else:
                yield each
        rests.sort(key=lambda rest: rest.lane)
        left = [item for rest in rests for item in rest.items][self._rest :]
        size = self._batches.size
        for start in range(0, len(left), size):
            portion = left[start : start + size]
            yield len(portion), self._batches.collated(portion), None

    def _gather(self, batches: Iterator[Portion]) -> list[Portion]:
        """One step's micro-batches; those that are not there any more repeat the last one and count nothing."""
        step: list[Portion] = []
        for _ in range(self.accumulate):
            with host_randomness_kept():
                found = next(batches, None)
                if found is None and self._spare is None and self.step:
                    # Resumed where this rank had nothing left: it keeps step with the others all the same.
                    self._spare = move(self._batches.example(), self.device)
            if found is None:
                step.append((0, self._spare, None))
            else:
                count, data, mark = found
                data = move(data, self.device)
                self._spare = data
                step.append((count, data, mark))
        return step

    def _agree(self, step: list[Portion]) -> Callable[[], int]:
        """Start to count this step's samples over all ranks; the answer, when asked for: 0 ends the epoch."""
        mine = sum(count for count, _, _ in step)
        barren = int(self._spare is None)
        if self.place.world_size == 1:
            return lambda: self._verdict(mine, barren)
        if not dist.is_initialized():
            raise UsageError(
                f"{self.place.world_size} ranks read a stream, but there is no process group to agree on its end",
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
                f"{barren} of {self.place.world_size} ranks got no item at all from the data set",
                hint="It holds fewer items than there are ranks: use fewer ranks, or drop_last=True.",
            )
        return total

    def _handed_out(self, step: list[Portion], total: int) -> Iterator[Micro]:
        number = self.step
        for index, (count, data, mark) in enumerate(step):
            if mark is not None:
                self._marks[mark.lane] = mark
                self._turn = (mark.lane + 1) % max(1, self.num_workers)
            else:
                self._rest += count
            last = index == self.accumulate - 1
            if last:
                self.step = number + 1
            yield Micro(data, count, total, index, last, number, self.place.world_size)

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
            "world_size": self.place.world_size,
            "num_workers": self.num_workers,
            "marks": [tuple(mark) for mark in self._marks.values()] if self._keeps_marks else [],
            "turn": self._turn,
            "rest": self._rest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["step"] and state["batch_size"] != self.batch_size:
            raise CheckpointError(
                f"the checkpoint stands in the midst of an epoch with batch_size={state['batch_size']}; "
                f"now it is {self.batch_size}",
                hint=f"Resume with batch_size={state['batch_size']}, or start a new run from these weights.",
            )
        self.seed = self._batches.source.seed = int(state["seed"])
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self._resumed = dict(state)

    @property
    def _inner(self) -> Any:
        return self._batches.source.dataset

    @property
    def _keeps_marks(self) -> bool:
        """Lanes that cut themselves may be of any length: only they know how far they are."""
        return self.sharded or is_stateful(self._inner)

    def close(self) -> None:
        self._crew.dismiss()


def _as_it_is(found: Any) -> Any:
    return found


def _say_on_rank_zero(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
