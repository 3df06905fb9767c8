"""Samplers and batch samplers: the same order on every rank, in every run and after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.loader import make_loader
from paceline.runtime.data.sample_order import Sampled
from paceline.runtime.distributed.identity import Identity
from tests.runtime.data.datasets import Noisy, Numbers


class OwnGenerators:
    """Draws from every kind of generator: global ones, and its own."""

    def __init__(self) -> None:
        self.torch, self.python, self.numpy = (
            torch.Generator(),
            random.Random(),
            numpy.random.default_rng(),
        )
        self.torch.seed()

    def __iter__(self) -> Iterator[int]:
        yield self.python.randrange(1000)
        yield int(self.numpy.integers(1000))
        yield int(torch.randint(1000, (), generator=self.torch))
        yield random.randrange(1000)
        yield int(numpy.random.randint(1000))
        yield int(torch.randint(1000, ()))


class Lengths:
    """A batch sampler that makes batches of different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(30).tolist()
        for start, stop in ((0, 1), (1, 8), (8, 20), (20, 30)):
            yield rows[start:stop]


def test_all_generators_are_seeded_for_the_draw_and_then_left_as_they_were() -> None:
    ours, theirs = OwnGenerators(), OwnGenerators()
    torch.manual_seed(1)
    before = torch.get_rng_state(), theirs.torch.get_state(), theirs.python.getstate()
    drawn = Sampled(ours).draw(3, 1).keys.tolist()
    assert Sampled(theirs).draw(3, 1).keys.tolist() == drawn
    assert torch.get_rng_state().equal(before[0])
    assert theirs.torch.get_state().equal(before[1])
    assert theirs.python.getstate() == before[2]
    assert Sampled(theirs).draw(3, 2).keys.tolist() != drawn
    assert Sampled(theirs).draw(4, 1).keys.tolist() != drawn


def rows_of(
    world_size: int, first: int | None = None, state: Any = None, **options: Any
) -> list[Any]:
    """The rows of each step over all ranks, sorted, in epoch 1."""
    steps: dict[int, list[Any]] = {}
    for rank in range(world_size):
        torch.manual_seed(rank)
        made = {name: value() for name, value in options.items() if callable(value)}
        loader = make_loader(
            Noisy(30), seed=3, identity=Identity(rank, world_size), **{**options, **made}
        )
        if state is not None:
            loader.load_state_dict(state)
        for micro in loader.micro_batches(1, first):
            rows = micro.data[0][: micro.count]
            assert micro.mean_scale == pytest.approx(len(rows) * world_size / micro.global_count)
            steps.setdefault(micro.step, []).append(rows)
        loader.close()
    return [torch.cat(steps[step]).sort(dim=0).values.tolist() for step in sorted(steps)]


SAMPLERS: list[dict[str, Any]] = [
    {"sampler": lambda: WeightedRandomSampler([1.0, 5.0, 9.0] * 10, 24), "batch_size": 8},
    {
        "sampler": lambda: RandomSampler(range(30), generator=torch.Generator()),
        "batch_size": 8,
        "drop_last": False,
    },
    {"batch_sampler": Lengths},
    {"batch_sampler": lambda: BatchSampler(RandomSampler(range(30)), 7, drop_last=False)},
]


@pytest.mark.parametrize("options", SAMPLERS)
def test_samplers_give_the_same_steps_at_every_world_size(options: dict[str, Any]) -> None:
    reference = rows_of(1, **options)
    assert rows_of(4, **options) == reference
    assert rows_of(2, accumulate=2, **options) == reference
    assert rows_of(2, first=2, **options) == reference[2:]


def test_an_index_drawn_twice_gets_two_augmentations() -> None:
    (step,) = rows_of(1, sampler=[4, 4], batch_size=2)
    assert step[0] != step[1]


def test_a_batch_sampler_decides_the_size_of_every_step() -> None:
    loader = make_loader(Numbers(30), batch_sampler=Lengths(), identity=Identity(1, 2))
    assert [(micro.count, micro.global_count) for micro in loader.micro_batches(0)] == [
        (1, 1),
        (4, 7),
        (6, 12),
        (5, 10),
    ]
    assert loader.steps_per_epoch == 4


def test_samplers_may_yield_other_keys_than_numbers() -> None:
    loader = make_loader(
        {"a": 1, "b": 2, "c": 3},
        sampler=["b", "c"],
        batch_size=2,
        collate_fn=list,
        identity=Identity(),
    )
    assert list(loader) == [[2, 3]]


class Stubborn:
    """A sampler whose order nothing that is saved determines."""

    draws = 0

    def __iter__(self) -> Iterator[int]:
        Stubborn.draws += 1
        return iter([Stubborn.draws % 8, *range(7)])


def test_a_resumed_epoch_has_the_same_order_or_is_refused() -> None:
    for sampler, fits in ((RandomSampler(range(8)), True), (Stubborn(), False)):
        loader = make_loader(Numbers(8), sampler=sampler, batch_size=2, identity=Identity())
        batches = loader.micro_batches(1)
        taken = [next(batches).data.tolist() for _ in range(2)]
        resumed = make_loader(Numbers(8), sampler=sampler, batch_size=2, identity=Identity())
        resumed.load_state_dict(loader.state_dict())
        if fits:
            rest = [micro.data.tolist() for micro in resumed.micro_batches(1)]
            assert sorted(row for batch in taken + rest for row in batch) == list(range(8))
        else:
            with pytest.raises(
                CheckpointError, match="yields a different order for epoch 1 than before"
            ):
                next(resumed.micro_batches(1))


def test_samplers_that_do_not_fit_are_refused() -> None:
    data = Numbers(8)
    with pytest.raises(UsageError, match="DistributedSampler splits the dataset by rank"):
        make_loader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(UsageError, match="shuffle has no meaning"):
        make_loader(data, batch_size=2, sampler=[1, 2], shuffle=True)
    for option in ({"batch_size": 2}, {"sampler": [1]}, {"shuffle": True}, {"drop_last": True}):
        with pytest.raises(UsageError, match=f"so {next(iter(option))} has no meaning"):
            make_loader(data, batch_sampler=[[1, 2]], **option)
    with pytest.raises(UsageError, match="needs batch_size"):
        make_loader(data)
    loader = make_loader(
        {"x": torch.ones(2)}, sampler=["x", "x"], batch_size=2, resident=True, identity=Identity()
    )
    with pytest.raises(UsageError, match="sampler yields str"):
        list(loader)
