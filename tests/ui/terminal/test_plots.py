"""Plots of characters."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.ui.terminal.plots import bar, divide_width, line_plot, sparkline
from paceline.watch.metrics import short_number

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    assert line_plot([(0, 10.0), (100, 0.0)], width=26, height=4) == [
        "10 ┤⠉⠒⠢⠤⣀⡀",
        "   │     ⠈⠑⠒⠤⢄⣀",
        "   │           ⠉⠑⠒⠤⢄⡀",
        " 0 ┤                ⠈⠉⠒⠢⠤⣀",
        "   └──────────────────────",
        "    0       step       100",
    ]


def test_values_over_decades_have_a_log_scale_that_is_named() -> None:
    falls = [(0, 100.0), (50, 0.1), (100, 0.0001)]
    assert line_plot(falls, width=36, height=5) == [
        "   100 ┤⠉⠒⠢⠤⣀",
        "       │     ⠉⠑⠒⠤⢄⡀",
        "   0.1 ┤          ⠈⠉⠒⠢⠤⣀⡀",
        "       │                ⠈⠉⠒⠢⠤⣀⡀",
        "0.0001 ┤                      ⠈⠉⠒⠢⠤⣀",
        "       └────────────────────────────",
        "        0         log y          100",
    ]
    assert "log y" in line_plot(falls, width=20, height=5)[-1]
    narrow = line_plot(falls, width=16, height=5)
    assert narrow[2].startswith("    50 ┤"), "a scale that cannot be named is not used"


@pytest.mark.parametrize(
    "values", [[100.0, 1.0], [100.0, 0.0], [1000.0, -1.0], [5.0], [math.inf, 2.0, 1.0]]
)
def test_other_values_have_a_linear_scale(values: list[float]) -> None:
    plot = line_plot(
        [(float(step), value) for step, value in enumerate(values)], width=60, height=5
    )
    assert plot
    assert "log" not in plot[-1]


@pytest.mark.parametrize("values", [[5e-324, 1.0], [1e-300, 1.7976931348623157e308], [1e-5, 1e5]])
def test_a_log_scale_takes_any_numbers_above_zero(values: list[float]) -> None:
    plot = line_plot(
        [(float(step), value) for step, value in enumerate(values)], width=60, height=5
    )
    assert "log" in plot[-1]


def test_a_line_has_a_dot_in_every_column() -> None:
    plot = line_plot([(0, 0.0), (50, 1.0), (100, 0.0)], width=40, height=6)
    body = [row.partition("┤")[2] or row.partition("│")[2] for row in plot[:6]]
    columns = max(map(len, body))
    assert all(
        any(len(row) > column and row[column] != " " for row in body) for column in range(columns)
    )
    peak = body[0].index(next(each for each in body[0] if each != " "))
    assert columns * 0.35 < peak < columns * 0.65


@given(
    points=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30),
    width=st.integers(0, 90),
    height=st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_no_line_is_wider_than_asked_whatever_the_numbers(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    plot = line_plot(points, width=width, height=height)
    assert len(plot) in (0, height + 2)
    assert all(len(row) <= width for row in plot)
    line = sparkline([y for _, y in points], width)
    assert len(line) <= width


def test_sparklines_show_the_course_of_the_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0] * 500 + [1.0] * 500, 10) == "▁▁▁▁▁█████"
    assert sparkline([5, 5, math.nan], 10) == "▄▄"
    assert sparkline([], 10) == ""


def test_short_numbers() -> None:
    assert [short_number(each) for each in (0.0123456, 12.3456, 9999, 51234, 2.5e9, -3e6)] == [
        "0.01235",
        "12.35",
        "9999",
        "51.23k",
        "2.5G",
        "-3M",
    ]


@given(st.dictionaries(st.text(), st.floats(0, 1e9), max_size=8), st.integers(0, 80))
def test_a_divided_width_is_used_up(amounts: dict[str, float], width: int) -> None:
    columns = divide_width(amounts, width)
    known = {name for name, amount in amounts.items() if amount > 0}
    if known and width >= len(known):
        assert sum(columns.values()) == width
        assert columns.keys() == known
        assert min(columns.values()) >= 1
    else:
        assert columns == {}


@pytest.mark.parametrize(("share", "expected"), [(0.5, "██░░"), (2.0, "████"), (math.nan, "░░░░")])
def test_bars(share: float, expected: str) -> None:
    assert bar(share, 4) == expected
