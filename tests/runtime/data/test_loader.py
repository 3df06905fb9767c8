"""The loader gives the same samples for any number of ranks and workers, and resumes exactly."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.loader import MapLoader, make_loader
from paceline.runtime.distributed.identity import Identity
from paceline.runtime.randomness import seed_everything
from tests.runtime.data.datasets import Counting, Noisy, Numbers, Positioned


def steps_of(loaders: list[Any], epoch: int, first: int | None = None) -> list[torch.Tensor]:
    """The rows of each step over all ranks, sorted."""
    steps: dict[int, list[torch.Tensor]] = {}
    for loader in loaders:
        for micro in loader.micro_batches(epoch, first):
            steps.setdefault(micro.step, []).append(micro.data[0][: micro.count])
        loader.close()
    return [torch.cat(steps[step]).sort(dim=0).values for step in sorted(steps)]


def over_ranks(world_size: int, **options: Any) -> list[MapLoader]:
    data = Noisy(53)
    return [
        MapLoader(
            data,
            batch_size=12,
            drop_last=False,
            seed=3,
            identity=Identity(rank, world_size),
            **options,
        )
        for rank in range(world_size)
    ]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a.equal(b) for a, b in zip(some, others, strict=True))


def test_samples_and_augmentation_do_not_depend_on_ranks_micro_steps_or_workers() -> None:
    reference = steps_of(over_ranks(1), 2)
    assert len(reference) == 5
    assert len(reference[-1]) == 53 - 48
    assert equal(steps_of(over_ranks(4), 2), reference)
    assert equal(steps_of(over_ranks(2, accumulate=3), 2), reference)
    assert equal(steps_of(over_ranks(1, num_workers=2), 2), reference)
    assert equal(steps_of(over_ranks(4), 2, 3), reference[3:])
    assert not equal(steps_of(over_ranks(1), 1), reference)


def test_a_loaded_position_continues_at_the_next_step_with_other_numbers_of_ranks_and_workers() -> (
    None
):
    reference = steps_of(over_ranks(1), 1)
    interrupted = over_ranks(2, accumulate=2)
    for loader in interrupted:
        batches = loader.micro_batches(1)
        for _ in range(5):  # two steps and half of the third, which does not count
            next(batches)
    state = interrupted[0].state_dict()
    assert (state["epoch"], state["step"]) == (1, 2)
    resumed = over_ranks(4, num_workers=1)
    for loader in resumed:
        loader.load_state_dict(state)
    assert equal(steps_of(resumed, 1), reference[2:])
    # Only the epoch of the saved position starts in the middle, and only once.
    assert equal(steps_of(resumed, 2), steps_of(over_ranks(1), 2))
    assert equal(steps_of(resumed, 1), reference)


def test_persistent_workers_use_a_loaded_seed() -> None:
    saved = over_ranks(1)[0].state_dict()
    loader = MapLoader(
        Noisy(53),
        batch_size=12,
        drop_last=False,
        seed=99,
        identity=Identity(),
        num_workers=1,
        persistent_workers=True,
    )
    next(loader.micro_batches(0))
    loader.load_state_dict(saved)
    assert equal(steps_of([loader], 0), steps_of(over_ranks(1), 0))


def test_a_state_that_does_not_fit_is_rejected() -> None:
    state = {**over_ranks(1)[0].state_dict(), "step": 2}
    other = MapLoader(Noisy(53), batch_size=6, drop_last=False, identity=Identity())
    with pytest.raises(CheckpointError, match="batch_size=12, but this loader has batch_size=6"):
        other.load_state_dict(state)
    fewer = MapLoader(Noisy(52), batch_size=12, drop_last=False, identity=Identity())
    with pytest.raises(CheckpointError, match="samples=53, but this loader has samples=52"):
        fewer.load_state_dict(state)


@pytest.mark.parametrize("resident", [True, False])
def test_plain_tensors_come_in_the_same_order_as_items(resident: bool) -> None:
    x, y = torch.randn(41, 3), torch.arange(41)
    items = [(x[row], y[row]) for row in range(41)]
    for world_size in (1, 2):
        for rank in range(world_size):
            options: dict[str, Any] = {
                "batch_size": 8,
                "drop_last": False,
                "seed": 7,
                "identity": Identity(rank, world_size),
            }
            slow = MapLoader(items, **options)
            fast = MapLoader(TensorDataset(x, y), resident=resident, device="cpu", **options)
            named = MapLoader({"x": x, "y": y}, resident=resident, **options)
            for one, two, three in zip(
                slow.micro_batches(1), fast.micro_batches(1), named.micro_batches(1), strict=True
            ):
                assert one.data[0].equal(two.data[0])
                assert one.data[1].equal(two.data[1])
                assert one.data[0].equal(three.data["x"])
                assert (one.count, one.global_count, one.last) == (
                    two.count,
                    two.global_count,
                    two.last,
                )


def test_a_resident_data_set_is_computed_once() -> None:
    loader = MapLoader(Noisy(20), batch_size=5, resident=True, shuffle=False, identity=Identity())
    first, second = [
        torch.cat([m.data[0] for m in loader.micro_batches(epoch)]) for epoch in (0, 1)
    ]
    assert first.equal(second)
    assert first.shape == (20, 6)


def test_scales_give_the_mean_of_the_whole_batch() -> None:
    values = torch.arange(11, dtype=torch.float64)
    for world_size, accumulate in ((1, 1), (2, 2), (4, 2)):
        means = 0.0
        for rank in range(world_size):
            loader = MapLoader(
                TensorDataset(values),
                batch_size=8,
                accumulate=accumulate,
                drop_last=False,
                shuffle=False,
                identity=Identity(rank, world_size),
            )
            for micro in loader.micro_batches(0, 1):  # the partial last batch: 8, 9 and 10
                # What DDP does with gradients: added over micro-steps, averaged over ranks.
                means += micro.data[0].mean().item() * micro.mean_scale / world_size
        assert means == pytest.approx(9.0, abs=1e-12)


def test_loading_does_not_disturb_the_global_generators() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()

    seed_everything(11)
    expected = [draws() for _ in range(5)]
    seed_everything(11)
    found = [draws() for _ in over_ranks(1)[0].micro_batches(0)]
    assert found == expected


def test_a_plain_loop_goes_from_epoch_to_epoch() -> None:
    loader = MapLoader(list(range(8)), batch_size=4, seed=1, identity=Identity())
    first, second = [torch.cat(list(loader)) for _ in range(2)]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(8))
    assert not first.equal(second)
    assert len(loader) == 2


@pytest.mark.parametrize("data", [list(range(16)), Positioned(16)])
def test_a_plain_loop_starts_anew_after_a_look_and_continues_after_a_resume(data: Any) -> None:
    loader = make_loader(data, batch_size=4, identity=Identity())
    next(iter(loader))
    assert len(list(loader)) == 4
    for _ in zip(range(2), loader, strict=False):
        pass
    assert len(list(loader)) == 4
    next(iter(loader))
    state = loader.state_dict()
    resumed = make_loader(copy.deepcopy(data), batch_size=4, identity=Identity())
    resumed.load_state_dict(state)
    assert [len(list(resumed)) for _ in range(2)] == [3, 4]


class Observed(Numbers):
    """Each item shows what the process that loads it has: the data set's level, and its number."""

    level = 0

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.level, os.getpid()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_start_anew_for_each_pass_unless_they_shall_persist(persistent: bool) -> None:
    data = Observed(4)
    loader = make_loader(
        data, batch_size=4, num_workers=1, persistent_workers=persistent, identity=Identity()
    )
    passes = []
    for data.level in range(3):
        ((levels, processes),) = list(loader)
        passes.append((int(levels[0]), int(processes[0])))
    loader.close()
    assert [level for level, _ in passes] == ([0, 0, 0] if persistent else [0, 1, 2])
    assert len({process for _, process in passes}) == (1 if persistent else 3)


def test_invalid_combinations_are_rejected() -> None:
    with pytest.raises(UsageError, match="torch DataLoader"):
        make_loader(DataLoader(Noisy(8)), batch_size=4)
    with pytest.raises(UsageError, match="shuffle doesn't work with Counting: a stream"):
        make_loader(Counting(8), batch_size=4, shuffle=True)
    with pytest.raises(UsageError, match="3 and 4 samples"):
        make_loader({"x": torch.zeros(3), "y": torch.zeros(4)}, batch_size=2)


@pytest.mark.parametrize("data", [Noisy(8), Counting(8), TensorDataset(torch.arange(8))])
@pytest.mark.parametrize("name", ["num_worker", "generator", "in_order"])
def test_unknown_options_are_rejected(data: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        make_loader(data, batch_size=4, **{name: 1})


@pytest.mark.parametrize("data", [Noisy(8), Counting(8)])
def test_workers_can_be_started_in_another_way(data: Any) -> None:
    loader = make_loader(
        data,
        batch_size=4,
        num_workers=1,
        multiprocessing_context="fork",
        timeout=60,
        pin_memory=False,
        prefetch_factor=1,
        identity=Identity(),
    )
    assert len(list(loader)) == 2
    loader.close()


def test_options_that_a_data_set_cannot_have_are_rejected() -> None:
    for options in ({"sampler": [1]}, {"persistent_workers": True}, {"resident": True}):
        with pytest.raises(UsageError, match=f"{next(iter(options))}.* doesn't work with Counting"):
            make_loader(Counting(8), batch_size=4, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sharded=True is for iterables"):
        make_loader(Noisy(8), batch_size=4, sharded=True)
    with pytest.raises(UsageError, match="resident=True doesn't work with collate_fn"):
        make_loader(Noisy(8), batch_size=4, resident=True, collate_fn=list)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        make_loader([torch.zeros(2), torch.zeros(3)], batch_size=2, resident=True)


class Batched(Noisy):
    """Fetches whole batches, as Hugging Face datasets do. The items may be random."""

    def __init__(self, samples: int, *, noisy: bool) -> None:
        super().__init__(samples)
        self.noisy = noisy
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if self.noisy else (self.x[index], self.y[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.fetched.append(len(indices))
        return [self[index] for index in indices]


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_batches_are_fetched_at_once_unless_that_would_change_augmentation(
    noisy: bool, nested: bool
) -> None:
    def steps(world_size: int) -> tuple[list[torch.Tensor], Batched]:
        data = Batched(24, noisy=noisy)
        used = Subset(data, range(24)) if nested else data
        loaders = [
            make_loader(used, batch_size=8, seed=3, identity=Identity(rank, world_size))
            for rank in range(world_size)
        ]
        return steps_of(loaders, 1), data

    alone, data = steps(1)
    assert data.fetched == ([8] if noisy else [8, 8, 8])
    assert equal(steps(2)[0], alone)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match=r"The dataset of run.loader is empty"):
        make_loader([], batch_size=2)


def test_a_data_set_that_changes_its_length_is_refused() -> None:
    dataset = [1.0] * 4
    loader = make_loader(dataset, batch_size=2)
    assert len(list(loader)) == 2
    dataset.append(1.0)
    with pytest.raises(UsageError, match=r"had 4 samples when run.loader got it, and now it has 5"):
        list(loader)
