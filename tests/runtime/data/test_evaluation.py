"""Evaluation counts every sample once on any number of ranks, with the same number of forwards on each."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from paceline.errors import UsageError
from paceline.runtime.data.evaluation import make_evaluation_loader
from paceline.runtime.data.loader import MapLoader
from paceline.runtime.data.stream_loader import StreamLoader
from paceline.runtime.data.transfer import map_tensors, to_device
from paceline.runtime.distributed.identity import Identity, read_identity
from tests.forked_ranks import Ranks
from tests.runtime.data.datasets import Counting, Noisy, Numbers


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 10),
    )


def count_on_a_rank(samples: int, batch_size: int) -> tuple[int, int, float, int]:
    """Evaluate as users write it, with a model whose forward synchronizes its buffers across ranks."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 10
    )
    model = DistributedDataParallel(net()).eval()
    hits, seen, loss, forwards = 0, 0, 0.0, 0
    with torch.no_grad():
        for x, y in make_evaluation_loader(data, batch_size=batch_size, identity=read_identity()):
            out = model(x)
            hits += int((out.argmax(1) == y).sum())
            seen += len(y)
            loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
            forwards += 1
    dist.destroy_process_group()
    return hits, seen, loss, forwards


# with 4 ranks: a last batch of 1 leaves three with nothing
@pytest.mark.parametrize("samples", [25, 23])
def test_counts_agree_at_every_world_size(ranks: Ranks, samples: int) -> None:
    alone = ranks(count_on_a_rank, 1, samples, 8)[0]
    assert alone[1] == samples
    for world_size in (2, 4):
        parts = ranks(count_on_a_rank, world_size, samples, 8)
        assert sum(part[0] for part in parts) == alone[0]
        assert sum(part[1] for part in parts) == samples
        assert sum(part[2] for part in parts) == pytest.approx(alone[2], rel=1e-5)
        assert {part[3] for part in parts} == {alone[3]}


def test_a_loader_is_accepted_instead_of_its_data_set() -> None:
    data = Noisy(21)
    ours = MapLoader(data, batch_size=4, identity=Identity(), collate_fn=len)
    plain = DataLoader(
        data, batch_size=4, shuffle=True, drop_last=True, collate_fn=lambda items: [len(items)]
    )
    assert list(make_evaluation_loader(ours, identity=Identity())) == [4, 4, 4, 4, 4, 1]
    assert [batch[0] for batch in make_evaluation_loader(plain, identity=Identity())] == [
        4,
        4,
        4,
        4,
        4,
        1,
    ]
    for rank in range(2):  # each takes the whole dataset into account, not its sampler's half
        sampler = DistributedSampler(data, num_replicas=2, rank=rank)
        loader = make_evaluation_loader(
            DataLoader(data, sampler=sampler), identity=Identity(rank, 2)
        )
        assert sum(len(y) for _, y in loader) == 10 + rank
    with pytest.raises(UsageError, match="DistributedSampler splits the dataset by rank"):
        make_evaluation_loader(
            DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, 0), 3, False))
        )
    with pytest.raises(UsageError, match="batch_sampler or dataset decides the batches"):
        make_evaluation_loader(DataLoader(data, batch_size=None), batch_size=4)


def test_streams_and_repeated_passes() -> None:
    stream = make_evaluation_loader(Counting(21), batch_size=4, identity=Identity())
    assert [sorted(torch.cat(list(stream)).tolist()) for _ in range(2)] == [list(range(21))] * 2
    noisy = make_evaluation_loader(Noisy(9), batch_size=4, identity=Identity(), num_workers=1)
    first, second = [torch.cat([x for x, _ in noisy]) for _ in range(2)]
    noisy.close()
    assert first.equal(second), "every evaluation has the same randomness"


def test_nested_batches_are_moved_whole() -> None:
    batch: dict[str, Any] = {
        "x": torch.ones(3, 2),
        "more": [torch.ones(3), ("a", torch.ones(()))],
        "names": ["a", "b"],
    }
    batch["record"] = Record(torch.ones(1), ["c"])
    moved = to_device(batch, torch.device("meta"))
    devices: list[str] = []
    map_tensors(moved, lambda each: devices.append(each.device.type))
    assert devices == ["meta"] * 4
    assert moved["record"].names == ["c"]


class Pair(NamedTuple):
    numbers: torch.Tensor
    names: list[str]


@dataclass(frozen=True)
class Record:
    numbers: torch.Tensor
    names: list[str]


class Custom:
    """A batch that is no container, with tensors whose batch dimension isn't the first, and a count."""

    def __init__(self, items: list[int]) -> None:
        self.rows = torch.tensor([items, items])
        self.count = len(items)
        self.constant = torch.ones(3)


def as_record(items: list[int]) -> Record:
    return Record(torch.tensor(items), [str(item) for item in items])


STREAM_SIZES = (0, 1, 2, 4)

# a collate function, and how to get a batch's samples back
COLLATES: dict[str, tuple[Any, Any]] = {
    "tensor": (default_collate, lambda batch: batch.tolist()),
    "tuple": (lambda items: (torch.tensor(items), "text"), lambda batch: batch[0].tolist()),
    "strings": (lambda items: tuple(map(str, items)), lambda batch: [int(text) for text in batch]),
    "list of dictionaries": (
        lambda items: [{"x": torch.tensor(item)} for item in items],
        lambda batch: [int(each["x"]) for each in batch],
    ),
    "named tuple": (
        lambda items: Pair(torch.tensor(items), [str(items)]),
        lambda batch: batch.numbers.tolist(),
    ),
    "data class": (as_record, lambda batch: list(map(int, batch.names))),
    "custom": (Custom, lambda batch: batch.rows[0].tolist()[: batch.count]),
    "mapping": (lambda items: UserDict(x=torch.tensor(items)), lambda batch: batch["x"].tolist()),
    "array": (numpy.array, lambda batch: batch.tolist()),
    "padded": (
        lambda items: {"x": torch.stack([torch.full((4,), item) for item in items], dim=1)},
        lambda batch: batch["x"][0].tolist(),
    ),
    "single items only": (
        lambda items: torch.tensor([item for (item,) in [items]]),
        lambda batch: batch.tolist(),
    ),
}


def sampler_of(kind: str, samples: int) -> Any:
    return {
        "none": lambda: None,
        "weighted": lambda: WeightedRandomSampler([1.0] * max(1, samples), max(1, samples)),
        "subset": lambda: SubsetRandomSampler(range(0, samples, 2)),
        "replacement": lambda: RandomSampler(
            range(max(1, samples)), replacement=True, num_samples=7
        ),
        "own generator": lambda: RandomSampler(
            range(max(1, samples)), generator=torch.Generator().manual_seed(samples)
        ),
    }[kind]()


def loader_of(samples: int, batch_size: int, collate: Any, sampler: str, batches: str) -> Any:
    """A DataLoader whose batches come from a batch size, from a batch sampler, or from the dataset itself."""
    chosen = sampler_of(sampler, samples) if samples else None
    if batches == "size":
        return DataLoader(
            Numbers(samples), batch_size=batch_size, sampler=chosen, collate_fn=collate
        )
    if batches == "sampler":
        batch_sampler = BatchSampler(chosen or range(samples), batch_size, drop_last=False)
        return DataLoader(Numbers(samples), batch_sampler=batch_sampler, collate_fn=collate)
    whole = [
        collate(list(range(start, min(start + batch_size, samples))))
        for start in range(0, samples, batch_size)
    ]
    return DataLoader(whole, batch_size=None)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    samples=st.integers(0, 23),
    batch_size=st.integers(1, 9),
    collate=st.sampled_from(sorted(COLLATES)),
    sampler=st.sampled_from(["none", "weighted", "subset", "replacement", "own generator"]),
    batches=st.sampled_from(["size", "sampler", "whole"]),
    world_size=st.integers(1, 4),
)
def test_every_sample_is_counted_once(
    *, samples: int, batch_size: int, collate: str, sampler: str, batches: str, world_size: int
) -> None:
    function, samples_of = COLLATES[collate]
    assume(collate != "single items only" or batch_size == 1)
    if batches == "whole":
        assume(
            collate
            not in ("custom", "strings", "mapping", "list of dictionaries", "array", "padded")
        )

    def seen_by(ranks: int) -> list[list[int]]:
        passes = []
        for rank in range(ranks):
            torch.manual_seed(rank)  # ranks draw different numbers
            loader = loader_of(samples, batch_size, function, sampler, batches)
            evaluated = make_evaluation_loader(loader, identity=Identity(rank, ranks))
            expected = evaluated.count_batches()
            passes.append([samples_of(batch) for batch in evaluated])
            assert expected == len(passes[-1])
        assert len({len(each) for each in passes}) == 1, (
            "every rank runs the same number of forwards"
        )
        return [batch for each in passes for batch in each]

    alone, together = seen_by(1), seen_by(world_size)
    counted = sorted(chain.from_iterable(together))
    assert counted == sorted(chain.from_iterable(alone))
    if sampler in ("none", "own generator") or batches == "whole":
        assert counted == list(range(samples))
    if batches == "sampler":
        assert sorted(filter(None, together)) == sorted(alone), "batches stay whole"
    elif batches == "size":
        assert max(map(len, together), default=0) <= max(1, -(-batch_size // world_size))


def test_no_rank_gets_an_empty_batch_if_the_last_two_can_be_shared() -> None:
    counts = [
        [
            len(batch)
            for batch in make_evaluation_loader(
                Numbers(25), batch_size=8, identity=Identity(rank, 4)
            )
        ]
        for rank in range(4)
    ]
    assert sum(map(sum, counts)) == 25
    assert min(map(min, counts)) == 1
    assert {len(each) for each in counts} == {4}


def test_a_batch_that_cannot_be_empty_is_refused_by_name() -> None:
    loader = DataLoader(Numbers(1), batch_size=4, collate_fn=lambda items: "text")
    with pytest.raises(UsageError, match="can't make an empty batch of str"):
        list(make_evaluation_loader(loader, identity=Identity(0, 2)))


def test_workers_make_empty_batches() -> None:
    loader = DataLoader(
        Numbers(1), batch_size=4, collate_fn=as_record, num_workers=1, worker_init_fn=check_worker
    )
    evaluation = make_evaluation_loader(loader, identity=Identity(0, 2))
    (batch,) = evaluation
    evaluation.close()
    assert (batch.numbers.shape, batch.names) == ((0,), [])


def check_worker(number: int) -> None:
    assert get_worker_info() is not None


def count_streams(num_workers: int) -> list[list[Any]]:
    """Streams of 0 to 4 items. Of those that split themselves, only the last rank's has any."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workers: dict[str, Any] = {
        "num_workers": num_workers,
        "multiprocessing_context": "fork" if num_workers else None,
    }
    found = []
    for items in STREAM_SIZES:
        stream = DataLoader(Counting(items), batch_size=2, collate_fn=as_record, **workers)
        found.append([samples_in(batch) for batch in make_evaluation_loader(stream)])
        own = Counting(items if rank == world_size - 1 else 0)
        loader = StreamLoader(own, batch_size=world_size, sharded=True, drop_last=False, **workers)
        found.append([samples_in(batch) for batch in make_evaluation_loader(loader)])
        found.append(
            [samples_in(micro.data) if micro.count else [] for micro in loader.micro_batches(0)]
        )
    dist.destroy_process_group()
    return found


def samples_in(batch: Any) -> list[int]:
    return (batch.numbers if isinstance(batch, Record) else batch).tolist()


@pytest.mark.parametrize(("world_size", "num_workers"), [(3, 0), (2, 1)])
def test_streams_with_fewer_items_than_ranks_are_counted_once(
    ranks: Ranks, world_size: int, num_workers: int
) -> None:
    passes = list(zip(*ranks(count_streams, world_size, num_workers), strict=True))
    expected = [list(range(items)) for items in STREAM_SIZES for _ in range(3)]
    for each, items in zip(passes, expected, strict=True):
        assert len({len(batches) for batches in each}) == 1
        assert sorted(item for batches in each for batch in batches for item in batch) == items


class PerWorker(IterableDataset[int]):
    """Splits itself between the workers of a plain DataLoader, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(20) if info is None else range(info.id, 20, info.num_workers)


def test_a_stream_that_splits_itself_by_worker_loses_no_samples() -> None:
    loader = make_evaluation_loader(
        DataLoader(PerWorker(), batch_size=3, num_workers=2), identity=Identity()
    )
    assert sorted(item for batch in loader for item in batch.tolist()) == list(range(20))
    loader.close()
    whole = make_evaluation_loader(DataLoader(PerWorker(), batch_size=None), identity=Identity())
    assert list(whole) == list(range(20))


def sampled_differently() -> str:
    dist.init_process_group("gloo")
    loader = DataLoader(Numbers(6), sampler=[dist.get_rank(), 2])
    try:
        list(make_evaluation_loader(loader))
    except UsageError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return "nothing"


def test_a_sampler_that_differs_between_ranks_is_refused(ranks: Ranks) -> None:
    assert all("different order on each rank" in each for each in ranks(sampled_differently, 2))


def test_every_pass_sees_the_data_set_as_it_is() -> None:
    dataset = [1.0] * 4
    loader = make_evaluation_loader(dataset, batch_size=2)
    assert sum(map(len, loader)) == 4
    dataset += [1.0] * 3
    assert sum(map(len, loader)) == 7
