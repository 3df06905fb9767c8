"""Curves stay small, keep their extremes, and forget steps that a restart repeats."""

from __future__ import annotations

import pytest

from paceline.watch.metrics import LIMIT, Curves


def lines(steps: range, value: float = 1.0) -> list[dict[str, object]]:
    return [
        {"step": step, "epoch": 0, "time": float(step), "loss": value / (step + 1)}
        for step in steps
    ]


def test_a_long_curve_keeps_its_spikes() -> None:
    curves = Curves()
    curves.add(lines(range(50_000)))
    curves.add([{"step": 50_000, "time": 50_000.0, "loss": 9.0}])
    curves.add(lines(range(50_001, 100_000)))
    curve = curves.curve("loss")
    assert len(curve.steps) <= 4 * LIMIT
    assert curve.steps == sorted(curve.steps)
    assert max(curve.values) == 9.0
    assert curve.steps[0] == 0
    assert min(curve.values) == curves.curve("loss").values[-1] == 1 / 100_000


def test_a_long_curve_ends_with_the_newest_value() -> None:
    curves, first = Curves(), 0
    for newest in (2001, 2002, 5003, 20_001):
        curves.add(lines(range(first, newest), value=-1.0 if newest % 2 else 1.0))
        # neither the lowest nor the highest
        curves.add([{"step": newest, "time": float(newest), "loss": 0.0}])
        first = newest + 1
        curve = curves.curve("loss")
        assert (curve.steps[-1], curve.values[-1]) == (newest, 0.0)
        assert curve.steps == sorted(set(curve.steps))
    curves.add([{"step": 100, "time": 1e6, "loss": 3.0}])  # a restart
    assert curves.curve("loss").values[-1] == 3.0


def test_a_restart_replaces_the_steps_that_it_repeats() -> None:
    curves = Curves()
    curves.add(lines(range(10)))
    curves.add(lines(range(5, 8), value=2.0))
    curve = curves.curve("loss")
    assert curve.steps == list(range(8))
    assert curve.values[4:6] == [1 / 5, 2 / 6]


# All places within the points that are drawn as one, and the ends.
FIRST, LAST = 49_985, 50_000
UNDONE = [
    pytest.param(step, marks=pytest.mark.slow if step % 3 and step not in (FIRST, LAST) else ())
    for step in range(FIRST, LAST + 1)
]


@pytest.mark.parametrize("undone", UNDONE)
def test_a_restart_undoes_a_spike_also_in_a_long_curve(undone: int) -> None:
    curves = Curves()
    curves.add(lines(range(50_000)))
    curves.add(
        [
            {"step": 50_000, "time": 50_000.0, "loss": 9.0},
            {"step": 50_001, "time": 50_001.0, "loss": -9.0},
        ]
    )
    assert curves.add(lines(range(undone, 50_001)))
    curve = curves.curve("loss")
    assert (max(curve.values), min(curve.values)) == (1.0, 1 / 50_001)
    assert curve.steps == sorted(set(curve.steps))
    assert not curves.add(lines(range(50_001, 60_000)))
    assert curves.curve("loss").steps[-1] == 59_999


def test_a_restart_undoes_numbers_that_are_logged_rarely() -> None:
    curves = Curves()
    curves.add([*lines(range(100)), {"step": 99, "time": 99.0, "accuracy": 0.5}])
    curves.add(lines(range(90, 95)))
    assert curves.names == ["loss"]
    curves.add([{"step": 99, "time": 199.0, "accuracy": 0.6}])
    assert curves.curve("accuracy").values == [0.6]


def test_only_finite_numbers_have_curves() -> None:
    curves = Curves()
    curves.add(
        [{"step": 1, "time": 1.0, "note": "x", "nan": "nan", "flag": True, "loss": 2}, {"loss": 3}]
    )
    assert curves.names == ["loss"]
    assert curves.curve("loss").values == [2.0]
