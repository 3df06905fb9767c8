"""Iterable datasets: every item goes to one reader, ranks end together, positions are saved or counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.evaluation import make_evaluation_loader
from paceline.runtime.data.sharded_iterable import ShardedIterable
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.distributed.identity import Identity, read_identity
from tests.forked_ranks import Ranks
from tests.runtime.data.datasets import Counting, Positioned


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_a_plain_dataloader_over_shards_has_every_item_once(world_size: int, workers: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        shard = ShardedIterable(Counting(40), identity=Identity(rank, world_size), seed=4)
        shard.set_epoch(2)
        seen += [
            item
            for batch in DataLoader(shard, batch_size=4, num_workers=workers)
            for item in batch.tolist()
        ]
    assert sorted(seen) == list(range(40))


def test_workers_do_not_change_the_batches_of_a_stream() -> None:
    def batches(workers: int, first: int = 0) -> list[list[int]]:
        loader = StreamLoader(
            Counting(50),
            batch_size=8,
            accumulate=2,
            seed=4,
            num_workers=workers,
            identity=Identity(),
            notify=lambda text: None,
        )
        got = [micro.data.tolist() for micro in loader.micro_batches(1, first)]
        loader.close()
        return got

    reference = batches(0)
    assert len(reference) == 12
    assert batches(2) == reference
    assert batches(2, first=3) == reference[6:]


def stream_rank(dataset_size: int, batch_size: int, drop_last: bool) -> list[list[Any]]:
    dist.init_process_group("gloo")
    loader = StreamLoader(
        Counting(dataset_size),
        batch_size=batch_size,
        drop_last=drop_last,
        seed=1,
        identity=read_identity(),
    )
    got = [
        [micro.step, micro.data.tolist() if micro.count else [], micro.global_count]
        for micro in loader.micro_batches(0)
    ]
    dist.destroy_process_group()
    return got


def test_the_samples_of_a_stream_are_the_same_at_every_world_size(ranks: Ranks) -> None:
    for drop_last, steps in ((True, 5), (False, 6)):
        alone = ranks(stream_rank, 1, 41, 8, drop_last)[0]
        pair = ranks(stream_rank, 2, 41, 8, drop_last)
        assert len(alone) == len(pair[0]) == len(pair[1]) == steps
        for step, whole in enumerate(alone):
            together = pair[0][step][1] + pair[1][step][1]
            assert sorted(together) == sorted(whole[1])
            assert pair[0][step][2] == pair[1][step][2] == len(whole[1])


class Uneven(IterableDataset[int]):
    """Splits itself unevenly: rank r holds 4 items more than the rank before it."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6 + 4 * read_identity().rank)


def uneven_rank(drop_last: bool) -> tuple[list[int], int]:
    dist.init_process_group("gloo")
    loader = StreamLoader(Uneven(), batch_size=4, sharded=True, drop_last=drop_last)
    counts = []
    for micro in loader.micro_batches(0):
        counts.append(micro.count)
        dist.all_reduce(torch.ones(1))  # as a DDP forward may do: hangs unless all ranks take part
    seen = sum(len(batch) for batch in make_evaluation_loader(loader, group=None, batch_size=4))
    dist.destroy_process_group()
    return counts, seen


def test_ranks_with_uneven_streams_end_together(ranks: Ranks) -> None:
    short, longer = ranks(uneven_rank, 2, True)
    assert short[0] == longer[0] == [2, 2, 2]
    short, longer = ranks(uneven_rank, 2, False)
    assert short[0] == [2, 2, 2, 0, 0]
    assert longer[0] == [2, 2, 2, 2, 2]


def test_a_stream_with_a_state_continues_from_it_without_reading_again() -> None:
    for workers in (0, 2):
        whole = StreamLoader(Positioned(60), batch_size=6, num_workers=workers, identity=Identity())
        expected = [micro.data.tolist() for micro in whole.micro_batches(0)]
        whole.close()
        interrupted = StreamLoader(
            Positioned(60), batch_size=6, num_workers=workers, identity=Identity()
        )
        batches = interrupted.micro_batches(0)
        for _ in range(3):
            next(batches)
        state = interrupted.state_dict()
        interrupted.close()
        notes: list[str] = []
        data = Positioned(60)
        resumed = StreamLoader(
            data, batch_size=6, num_workers=workers, identity=Identity(), notify=notes.append
        )
        resumed.load_state_dict(state)
        assert [micro.data.tolist() for micro in resumed.micro_batches(0)] == expected[3:]
        resumed.close()
        assert not notes
        assert workers or data.read_from == [18]


def test_a_plain_loop_continues_between_two_epochs() -> None:
    first, resumed = (StreamLoader(Positioned(12), batch_size=6) for _ in range(2))
    list(first)
    resumed.load_state_dict(first.state_dict())
    for loader in (first, resumed):
        assert (len(list(loader)), loader.epoch) == (2, 2)


def test_a_stream_without_a_state_skips_items_and_prints_a_note() -> None:
    notes: list[str] = []
    first = StreamLoader(Counting(60), batch_size=6, identity=Identity(), seed=2)
    expected = [micro.data.tolist() for micro in first.micro_batches(1)]
    state = {**first.state_dict(), "step": 4}
    resumed = StreamLoader(
        Counting(60), batch_size=6, num_workers=2, identity=Identity(), seed=0, notify=notes.append
    )
    resumed.load_state_dict(state)
    assert [micro.data.tolist() for micro in resumed.micro_batches(1)] == expected[4:]
    resumed.close()
    assert notes == ["the dataset saves no position: skipping 24 items to step 4 of epoch 1"]
    with pytest.raises(CheckpointError, match="batch_size=6, but this loader has batch_size=12"):
        StreamLoader(Counting(60), batch_size=12, identity=Identity()).load_state_dict(state)


class SplitByWorker(IterableDataset[int]):
    """Splits itself by worker: each worker has its own items."""

    def __init__(self, each: int) -> None:
        self.each = each

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(100 * info.id, 100 * info.id + self.each)


def split_by_worker(
    each: int, state: dict[str, Any] | None = None, *, workers: int = 2
) -> StreamLoader:
    loader = StreamLoader(
        SplitByWorker(each),
        batch_size=4,
        sharded=True,
        num_workers=workers,
        drop_last=False,
        identity=Identity(),
        notify=lambda text: None,
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def after(loader: StreamLoader, steps: int) -> dict[str, Any]:
    """The loader's state after this many steps."""
    batches = loader.micro_batches(0)
    for _ in range(steps):
        next(batches)
    loader.close()
    return loader.state_dict()


def remaining(loader: StreamLoader) -> list[list[int]]:
    found = [micro.data.tolist() for micro in loader.micro_batches(0)]
    loader.close()
    return found


def test_slots_with_less_than_a_batch_resume_exactly() -> None:
    expected = remaining(split_by_worker(3))
    assert expected == [[0, 1, 2, 100], [101, 102]]
    assert remaining(split_by_worker(3, after(split_by_worker(3), 1))) == expected[1:]


def test_a_second_resume_is_exact_after_one_with_another_number_of_workers() -> None:
    first = after(split_by_worker(40, workers=1), 4)
    expected = remaining(split_by_worker(40, first))
    assert remaining(split_by_worker(40, after(split_by_worker(40, first), 1))) == expected[1:]


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(UsageError, match="no process group"):
        next(StreamLoader(Counting(60), batch_size=6, identity=Identity(0, 2)).micro_batches(0))
