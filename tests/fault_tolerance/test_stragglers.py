"""Who counts as slow, as a table."""

from __future__ import annotations

import pytest

from paceline.runtime.boundary.stragglers import stragglers


@pytest.mark.parametrize(
    ("paces", "slow"),
    [
        ([1.0, 1.1, 0.9, 1.0], []),
        ([1.0, 1.7, 1.0, 4.0], [3, 1]),  # the slowest first
        ([1.0, 1.6], [1]),  # of two ranks the faster one is the measure
        ([0.0, 5.0], []),  # a rank that has not said its pace is no measure
        ([0.001, 0.004, 0.001], []),  # four times as slow, and of no account in a step that takes long
    ],
)
def test_stragglers(paces: list[float], slow: list[int]) -> None:
    assert list(stragglers(paces, factor=1.5, least=0.1)) == slow
