"""Which ranks count as stragglers."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.contract.foreign_records import LineWriter
from paceline.runtime.step_boundary import stragglers
from paceline.runtime.step_boundary.stragglers import StragglerDetector, find_stragglers


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([1.0, 1.1, 0.9, 1.0], []),
        ([1.0, 1.7, 1.0, 4.0], [3, 1]),  # the slowest first
        ([1.0, 2.1], [1]),  # of two ranks, the faster is the reference
        ([1.0, 1.9], []),  # and it takes a clear margin
        ([1.0, 1.0, 1.6], [2]),
        ([0.0, 5.0], []),  # a rank without a measurement is not a reference
        ([0.001, 0.004, 0.001], []),  # four times as slow, but negligible in a long step
    ],
)
def test_stragglers(seconds: list[float], slow: list[int]) -> None:
    assert list(find_stragglers(seconds, factor=1.5, min_seconds=0.1)) == slow


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.02, 0.09], "rank 1 is slower than rank 0: 4.5 times as long"),
        ([0.02, 0.02, 0.09], "rank 2 is slower than the others: 4.5 times the median"),
        ([0.001, 0.004], ""),  # a tiny model: the difference is noise
    ],
)
def test_a_straggler_is_reported_after_a_while(
    seconds: list[float],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A short run has none."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    detector = StragglerDetector(
        LineWriter(None),
        rank=0,
        hosts=[],
        world_size=len(seconds),
        factor=1.5,
        device=torch.device("cpu"),
    )
    for moment in (0.0, 1.0, 2.0, stragglers.MIN_DURATION - 1):
        now[0] = moment
        detector.report(seconds, step=1, epoch=0, seconds_per_step=0.01)
    assert capsys.readouterr().err == ""
    now[0] = stragglers.MIN_DURATION
    detector.report(seconds, step=2, epoch=0, seconds_per_step=0.01)
    err = capsys.readouterr().err
    assert (expected in err) if expected else not err
