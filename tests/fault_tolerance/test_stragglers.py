"""Which ranks count as stragglers."""

from __future__ import annotations

import pytest

from paceline.runtime.step_boundary.stragglers import find_stragglers


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.1, 0.9, 1.0], []),
        ([1.0, 1.7, 1.0, 4.0], [3, 1]),  # the slowest first
        ([1.0, 1.6], [1]),  # of two ranks, the faster is the reference
        ([0.0, 5.0], []),  # a rank without a measurement is not a reference
        ([0.001, 0.004, 0.001], []),  # four times as slow, but negligible in a long step
    ],
)
def test_stragglers(seconds: list[float], slow: list[int]) -> None:
    assert list(find_stragglers(seconds, factor=1.5, min_seconds=0.1)) == slow
