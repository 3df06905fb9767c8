"""The loader gives the same samples however many ranks and workers there are, and goes on exactly."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.data.batches import At
from paceline.runtime.data.loader import Loader, make_loader
from paceline.runtime.data.randomness import mix, seed_everything
from tests.runtime.data.sets import Counting, Noisy


def steps_of(loaders: list[Any], epoch: int, first: int | None = None) -> list[torch.Tensor]:
    """The rows of each step, over all ranks, in one order: what the model is shown."""
    steps: dict[int, list[torch.Tensor]] = {}
    for loader in loaders:
        for micro in loader.micro_batches(epoch, first):
            steps.setdefault(micro.step, []).append(micro.data[0][: micro.count])
        loader.close()
    return [torch.cat(steps[step]).sort(dim=0).values for step in sorted(steps)]


def over_ranks(world: int, **options: Any) -> list[Loader]:
    data = Noisy(53)
    return [
        Loader(data, batch_size=12, drop_last=False, seed=3, identity=At(rank, world), **options)
        for rank in range(world)
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


def test_a_loaded_position_goes_on_with_the_next_step_on_another_number_of_ranks_and_workers() -> None:
    reference = steps_of(over_ranks(1), 1)
    interrupted = over_ranks(2, accumulate=2)
    for loader in interrupted:
        batches = loader.micro_batches(1)
        for _ in range(5):  # two steps, and half of the third: it is not taken
            next(batches)
    state = interrupted[0].state_dict()
    assert (state["epoch"], state["step"]) == (1, 2)
    resumed = over_ranks(4, num_workers=1)
    for loader in resumed:
        loader.load_state_dict(state)
    assert equal(steps_of(resumed, 1), reference[2:])
    # Only the epoch in which the state stood is entered in its midst, and only once.
    assert equal(steps_of(resumed, 2), steps_of(over_ranks(1), 2))
    assert equal(steps_of(resumed, 1), reference)


def test_persistent_workers_follow_a_seed_that_was_loaded() -> None:
    saved = over_ranks(1)[0].state_dict()
    loader = Loader(Noisy(53), batch_size=12, drop_last=False, seed=99, identity=At(), num_workers=1)
    next(loader.micro_batches(0))
    loader.load_state_dict(saved)
    assert equal(steps_of([loader], 0), steps_of(over_ranks(1), 0))


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = {**over_ranks(1)[0].state_dict(), "step": 2}
    other = Loader(Noisy(53), batch_size=6, drop_last=False, identity=At())
    with pytest.raises(CheckpointError, match="batch_size=12; now it is 6"):
        other.load_state_dict(state)
    fewer = Loader(Noisy(52), batch_size=12, drop_last=False, identity=At())
    with pytest.raises(CheckpointError, match="samples=53; now it is 52"):
        fewer.load_state_dict(state)


@pytest.mark.parametrize("resident", [True, False])
def test_plain_tensors_come_in_the_same_order_as_items(resident: bool) -> None:
    x, y = torch.randn(41, 3), torch.arange(41)
    items = [(x[row], y[row]) for row in range(41)]
    for world in (1, 2):
        for rank in range(world):
            options: dict[str, Any] = {
                "batch_size": 8,
                "drop_last": False,
                "seed": 7,
                "identity": At(rank, world),
            }
            slow = Loader(items, **options)
            fast = Loader(TensorDataset(x, y), resident=resident, device="cpu", **options)
            named = Loader({"x": x, "y": y}, resident=resident, **options)
            for one, two, three in zip(
                slow.micro_batches(1), fast.micro_batches(1), named.micro_batches(1), strict=True
            ):
                assert one.data[0].equal(two.data[0])
                assert one.data[1].equal(two.data[1])
                assert one.data[0].equal(three.data["x"])
                assert (one.count, one.global_count, one.last) == (two.count, two.global_count, two.last)


def test_a_resident_data_set_is_made_once() -> None:
    kept = Loader(Noisy(20), batch_size=5, resident=True, shuffle=False, identity=At())
    first, second = [torch.cat([m.data[0] for m in kept.micro_batches(epoch)]) for epoch in (0, 1)]
    assert first.equal(second)
    assert first.shape == (20, 6)


def test_scales_make_the_mean_of_the_whole_batch() -> None:
    values = torch.arange(11, dtype=torch.float64)
    for world, accumulate in ((1, 1), (2, 2), (4, 2)):
        means, sums = 0.0, 0.0
        for rank in range(world):
            loader = Loader(
                TensorDataset(values), batch_size=8, accumulate=accumulate, drop_last=False, shuffle=False,
                identity=At(rank, world),
            )  # fmt: skip
            for micro in loader.micro_batches(0, 1):  # the tail: 8, 9 and 10
                # What DDP does with gradients: added over micro-steps, averaged over ranks.
                means += micro.data[0].mean().item() * micro.mean_scale / world
                sums += micro.data[0].sum().item() * micro.sum_scale / world
        assert means == pytest.approx(9.0, abs=1e-12)
        assert sums == pytest.approx(9.0, abs=1e-12)


def test_loading_does_not_disturb_the_generators_of_the_model() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), torch.rand(()).item()

    seed_everything(11)
    expected = [draws() for _ in range(5)]
    seed_everything(11)
    found = [draws() for _ in over_ranks(1)[0].micro_batches(0)]
    assert found == expected


def test_without_seeds_a_data_set_is_asked_for_plain_indices() -> None:
    loader = Loader(list(range(8)), batch_size=4, shuffle=False, augment_seeds=False, identity=At())
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_plain_loop_goes_from_epoch_to_epoch() -> None:
    loader = Loader(list(range(8)), batch_size=4, seed=1, identity=At())
    first, second = [torch.cat(list(loader)) for _ in range(2)]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(8))
    assert not first.equal(second)
    assert len(loader) == 2


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(UsageError, match="torch DataLoader"):
        make_loader(DataLoader(Noisy(8)), batch_size=4)
    with pytest.raises(UsageError, match="shuffle=True, but Counting is a stream"):
        make_loader(Counting(8), batch_size=4, shuffle=True)
    with pytest.raises(UsageError, match="3 and 4 samples"):
        make_loader({"x": torch.zeros(3), "y": torch.zeros(4)}, batch_size=2)


def test_neighbouring_keys_give_unrelated_seeds() -> None:
    seeds = {mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len(seeds) == 10_000
    assert 0.49 < sum(seed.bit_count() for seed in seeds) / 64 / 10_000 < 0.51
