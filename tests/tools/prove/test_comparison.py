"""How differences of losses are measured, and samples."""

from __future__ import annotations

import pytest

from paceline.tools.prove.comparison import largest_difference
from paceline.tools.prove.records import Case, CaseRecords, RankRecords
from paceline.tools.prove.samples import SampleComparison


@pytest.mark.parametrize(
    ("losses", "others", "dtype", "difference"),
    [
        ({1: 2e-4, 2: 1e-4}, {1: 2e-4, 2: 1.02e-4}, "float64", 0.01),
        # next to the first loss, the second one is small
        ({1: 2.0, 2: 1e-4}, {1: 2.0, 2: 2e-4}, "float64", 1e-4),
        ({1: 50.0}, {1: 51.0}, "float32", 1 / 51),
        ({1: 0.0}, {1: 1e-9}, "float32", 1e-6),  # rounding around zero
    ],
)
def test_small_losses_are_compared_relative_to_their_size(
    losses: dict[int, float], others: dict[int, float], dtype: str, difference: float
) -> None:
    found, _ = largest_difference(make_case(losses, dtype), make_case(others, dtype))
    assert found == pytest.approx(difference)


def make_case(losses: dict[int, float], dtype: str) -> CaseRecords:
    steps = {step: {"losses": [loss]} for step, loss in losses.items()}
    return CaseRecords(Case(1, 3), [RankRecords(start={"dtype": dtype}, steps=steps)])


def test_runs_with_equally_many_ranks_have_no_wrong_batch_size() -> None:
    def record(name: str) -> CaseRecords:
        step = {
            "rows": 16,
            "samples": None,
            "contents": [[(1, hash((name, number)))] for number in range(16)],
        }
        return CaseRecords(Case(2, 3), [RankRecords(steps={1: step}) for _ in range(1)])

    cause = SampleComparison(record("one"), record("other")).compare().cause
    assert cause is not None
    assert "each rank takes a whole batch" not in cause.evidence
