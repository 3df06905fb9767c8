"""The loader for iterable-style datasets: a global batch size, and an epoch that ends on all ranks
together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.console import note
from paceline.runtime.data.epoch_loader import EpochLoader
from paceline.runtime.data.sample_assignment import MicroBatch, check_batch_size
from paceline.runtime.data.sharded_iterable import (
    Example,
    Leftover,
    RankBatches,
    ShardedIterable,
    StreamPosition,
    is_stateful,
)
from paceline.runtime.data.transfer import transfer_batch
from paceline.runtime.data.webdataset import SeededPipeline, check_not_mixed, is_pipeline
from paceline.runtime.data.workers import WorkerLoader
from paceline.runtime.randomness import preserve_host_rng

# number of samples, the data, the position after it
StreamBatch = tuple[int, Any, StreamPosition | None]


class StreamLoader(EpochLoader):
    """Batches of an iterable dataset. `batch_size` is global; an epoch ends on all ranks at the
    same step.

    With `drop_last` the epoch ends after the last step that is full on every rank. Otherwise it
    ends when no rank has a sample left; until then a rank without samples repeats its last batch,
    with a count of 0. If the collate function can make empty batches, for an evaluation, it gets
    one of those.
    """

    steps_per_epoch = None  # unknown: each rank reads its part until it ends

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        sharded: bool = False,
        notify: Callable[[str], None] = note,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, **options)
        self.batch_size: int = batch_size
        identity = self.identity
        check_batch_size(batch_size, world_size=identity.world_size, accumulate=self.accumulate)
        self._notify = notify
        inner = dataset.dataset if isinstance(dataset, ShardedIterable) else dataset
        if is_pipeline(inner):
            inner = SeededPipeline(
                inner, identity=identity, workers=self.options.num_workers, notify=self._print_note
            )
            sharded = inner.splits
        elif not sharded:
            check_not_mixed(inner)
        self.sharded = sharded
        self._batches = RankBatches(
            ShardedIterable(inner, identity=identity, seed=self.seed),
            size=batch_size // (identity.world_size * self.accumulate),
            sharded=sharded,
            collate_fn=self.options.collate_fn or default_collate,
        )
        self._workers = WorkerLoader(self, self._batches, self.options, collate_fn=_keep)
        self._filler: Any = None  # what this rank gets when it has no batch left
        self._example: Example | None = None  # an item of the stream, to make one of
        self._positions: dict[int, StreamPosition] = {}
        self._next_slot = 0  # the worker slot that the next batch comes from
        self._leftovers_used = 0  # leftover items that were already yielded
        self._before_pass: Any = None  # the state of the dataset before a pass that has not ended

    def _print_note(self, text: str) -> None:
        if self.identity.rank == 0:
            self._notify(text)

    def _read(
        self, epoch: int, first_step: int, position: Mapping[str, Any]
    ) -> Iterator[MicroBatch]:
        self._begin(epoch, first_step)
        self._restore_positions(position)
        batches = self._append_leftovers(self._start_pass())
        step = self._fetch_step(batches)
        total = self._count_samples(step)
        while (count := total()) > 0:
            # Fetch and count the next step before yielding this one, so that its total arrives in
            # time.
            upcoming = self._fetch_step(batches)
            total = self._count_samples(upcoming)
            yield from self._yield_step(step, count)
            step = upcoming

    def _restore_positions(self, state: Mapping[str, Any]) -> None:
        """Take the slots' positions from a state if they fit; otherwise count batches from the
        start.
        """
        slots = max(1, self.options.num_workers)
        self._positions, self._leftovers_used = {}, 0
        self._next_slot = self.step * self.accumulate % slots
        same = state and (state["world_size"], state["num_workers"]) == (
            self.identity.world_size,
            self.options.num_workers,
        )
        # A slot too short for a full batch has no position: the items it gave are counted as
        # leftovers.
        if same and self.saves_positions and (state["positions"] or state.get("leftovers_used")):
            self._positions = {
                position[0]: StreamPosition(*position) for position in state["positions"]
            }
            self._next_slot = state.get("next_slot", self._next_slot)
            self._leftovers_used = state.get("leftovers_used", 0)
        elif self.sharded:
            # As many batches per slot as if they had taken turns. The next save must include these
            # positions.
            done = {
                slot: -(-(self.step * self.accumulate - slot) // slots) for slot in range(slots)
            }
            size = self._batches.size
            self._positions = {
                slot: StreamPosition(slot, count * size, None)
                for slot, count in done.items()
                if count > 0
            }
        if not self.step:
            return
        if state and self.sharded and not same:
            self._print_note(
                f"this epoch was read by {state['world_size']} ranks with {state['num_workers']} "
                f"workers each, and continues on {self.identity.world_size} with "
                f"{self.options.num_workers}: the stream is split differently, so some samples of "
                "the epoch appear twice or not at all"
            )
        if not any(position.state is not None for position in self._positions.values()):
            self._print_note(
                f"the dataset saves no position: skipping {self.step * self.batch_size} items "
                f"to step {self.step} of epoch {self.epoch}"
            )

    def _start_pass(self) -> Iterator[Any]:
        batches = self._batches
        dataset = batches.source.dataset
        if is_stateful(dataset) and not self.options.num_workers:  # workers have copies of it
            if self._before_pass is not None:
                dataset.load_state_dict(copy.deepcopy(self._before_pass))  # type: ignore[attr-defined]
            self._before_pass = copy.deepcopy(dataset.state_dict())  # type: ignore[attr-defined]
        batches.source.set_epoch(self.epoch)
        batches.first_batch, batches.first_slot = self.step * self.accumulate, self._next_slot
        batches.positions = dict(self._positions)
        return self._workers.begin_pass()

    def _append_leftovers(self, batches: Iterator[Any]) -> Iterator[StreamBatch]:
        """Yield the full batches of all slots, then the slots' leftovers combined into batches."""
        leftovers: list[Leftover] = []
        for batch in batches:
            if isinstance(batch, Example):
                self._example = batch
            elif isinstance(batch, Leftover):
                leftovers.append(batch)
            else:
                yield batch
        self._before_pass = None
        leftovers.sort(key=lambda leftover: leftover.slot)
        items = [item for leftover in leftovers for item in leftover.items][self._leftovers_used :]
        size = self._batches.size
        for start in range(0, len(items), size):
            part = items[start : start + size]
            yield len(part), self._batches.collate(part), None

    def _fetch_step(self, batches: Iterator[StreamBatch]) -> list[StreamBatch]:
        """Fetch one step's micro-batches; missing ones have no data yet and a count of 0."""
        step: list[StreamBatch] = []
        for _ in range(self.accumulate):
            with preserve_host_rng():
                count, data, position = next(batches, (0, None, None))
            if count:
                data = transfer_batch(data, self.device)
                if not self._batches.makes_empty:
                    self._filler = data
            step.append((count, data, position))
        return step

    def _get_filler(self) -> Any:
        """Return what this rank gets to keep step with the others, although it has no batch
        left.
        """
        if self._filler is None:
            assert self._example is not None, "without a batch, a rank gets the example of others"
            with preserve_host_rng():
                filler = self._batches.filler(self._example.item)
            self._filler = transfer_batch(filler, self.device)
        return self._filler

    def _count_samples(self, step: list[StreamBatch]) -> Callable[[], int]:
        """Start counting this step's samples over all ranks; call the result for the total. 0 ends
        the epoch.
        """
        counts = [count for count, _, _ in step]
        sums = torch.tensor([sum(counts), int(0 in counts and self._example is None)])
        if self.identity.world_size == 1:
            return lambda: self._check_total(sums)
        if not dist.is_initialized():
            raise UsageError(
                f"{self.identity.world_size} ranks read a stream, but there is no process group "
                "to agree on its end.",
                hint="Create the loader inside paceline.session(), or after "
                "torch.distributed.init_process_group().",
            )
        if dist.get_backend(self.group) in ("nccl", "xccl"):
            sums = sums.to(self.device)
        work = dist.all_reduce(sums, group=self.group, async_op=True)

        def total() -> int:
            work.wait()
            return self._check_total(sums)

        return total

    def _check_total(self, sums: torch.Tensor) -> int:
        total, ranks_without_example = map(int, sums.tolist())
        if total < self.batch_size and self.drop_last:
            return 0
        if total and ranks_without_example:
            self._share_example()
        return total

    def _share_example(self) -> None:
        """Send an item to the ranks that never got one. Called on all ranks."""
        held: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(held, self._example is not None, group=self.group)
        sent = [self._example]
        dist.broadcast_object_list(sent, group=self.group, group_src=held.index(True))
        self._example = self._example or sent[0]

    def _yield_step(self, step: list[StreamBatch], total: int) -> Iterator[MicroBatch]:
        number = self.step
        for index, (count, fetched, position) in enumerate(step):
            if position is not None:
                self._positions[position.slot] = position
                self._next_slot = (position.slot + 1) % max(1, self.options.num_workers)
            else:
                self._leftovers_used += count
            last = index == self.accumulate - 1
            if last:
                self.step = number + 1
            data = fetched if count else self._get_filler()
            yield MicroBatch(data, count, total, index, last, number, self.identity.world_size)

    def state_dict(self) -> dict[str, Any]:
        if self._loaded:
            return dict(self._loaded)
        positions = self._positions.values() if self.saves_positions else ()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": self.identity.world_size,
            "num_workers": self.options.num_workers,
            "positions": [tuple(position) for position in positions],
            "next_slot": self._next_slot,
            "leftovers_used": self._leftovers_used,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["step"] and state["batch_size"] != self.batch_size:
            raise CheckpointError(
                "The checkpoint is in the middle of an epoch with "
                f"batch_size={state['batch_size']}, "
                f"but this loader has batch_size={self.batch_size}.",
                hint=f"Resume with batch_size={state['batch_size']}, or start a new run from "
                "these weights.",
            )
        self.seed = self._batches.source.seed = int(state["seed"])
        self._load_position(state)

    @property
    def saves_positions(self) -> bool:
        """Slots of a stream that splits itself differ in length, so only they know how far they
        are.
        """
        return self.sharded or is_stateful(self._batches.source.dataset)

    def close(self) -> None:
        self._workers.shutdown()


def _keep(batch: Any) -> Any:
    return batch
