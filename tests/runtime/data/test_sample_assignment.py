"""Global batches are the same at every world size, and every slice is taken once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.runtime.data.sample_assignment import EpochPlan, evaluation_slices
from paceline.runtime.data.sample_order import epoch_order
from paceline.runtime.distributed.identity import Identity


def positions(plan: EpochPlan, first_step: int = 0) -> list[list[int]]:
    """The positions of real samples that a rank takes, by step."""
    steps: dict[int, list[int]] = {}
    for each in plan.slices(first_step):
        steps.setdefault(each.step, []).extend(range(each.start, each.stop) if each.count else [])
    return [steps[step] for step in sorted(steps)]


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    st.integers(1, 90),
    st.booleans(),
    st.data(),
)
def test_every_step_is_split_without_gap_or_overlap(
    shape: tuple[int, int, int], samples: int, drop_last: bool, data: st.DataObject
) -> None:
    world_size, accumulate, per_slice = shape
    batch = world_size * accumulate * per_slice
    if drop_last and samples < batch:
        samples += batch
    plans = [
        EpochPlan(samples, batch, Identity(rank, world_size), accumulate, drop_last)
        for rank in range(world_size)
    ]
    first = data.draw(st.integers(0, plans[0].steps))
    taken = [positions(plan, first) for plan in plans]
    assert len({len(list(plan.slices(first))) for plan in plans}) == 1, (
        "ranks differ in their number of micro-steps"
    )
    for number, step in enumerate(range(first, plans[0].steps)):
        together = sorted(
            position for rank in range(world_size) for position in taken[rank][number]
        )
        assert together == list(range(step * batch, min(samples, (step + 1) * batch)))
    for plan in plans:
        for each in plan.slices(first):
            assert 0 <= each.start < each.stop <= samples
            assert each.count in (0, each.stop - each.start)
            assert each.last == (each.index == accumulate - 1)
    total = {each.step: each.global_count for each in plans[0].slices(first)}
    for step, size in total.items():
        assert size == sum(
            each.count for plan in plans for each in plan.slices(step) if each.step == step
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 100))
def test_evaluation_takes_every_sample_once_with_the_same_number_of_forwards_on_every_rank(
    world_size: int, batch: int, samples: int
) -> None:
    ranks = [
        list(evaluation_slices(samples, batch, Identity(rank, world_size)))
        for rank in range(world_size)
    ]
    seen = [
        position
        for slices in ranks
        for each in slices
        if each.count
        for position in range(each.start, each.stop)
    ]
    assert sorted(seen) == list(range(samples))
    assert len({len(slices) for slices in ranks}) == 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = epoch_order(1000, seed=1, epoch=0)
    assert first.equal(epoch_order(1000, seed=1, epoch=0))
    assert sorted(first.tolist()) == list(range(1000))
    for other in (epoch_order(1000, seed=1, epoch=1), epoch_order(1000, seed=2, epoch=0)):
        assert not first.equal(other)
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_error_about_a_batch_size_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"batch_size=100 .* 4 ranks x 3 micro-steps") as caught:
        EpochPlan(1000, 100, Identity(0, 4), 3)
    assert "96 or 108" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        EpochPlan(1000, 5, Identity(0, 4), 2)
    assert "multiple of 8: 8" in caught.value.hint
    with pytest.raises(UsageError, match="no full step"):
        EpochPlan(10, 16, Identity())
