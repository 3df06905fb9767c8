"""Plots made of characters: a curve with axes, a sparkline, bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from paceline.watch.metrics import short_number

BLOCKS = " ▁▂▃▄▅▆▇█"
BRAILLE = 0x2800
# of a character: rows from the top, two columns
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
LARGEST = 1e300  # so that differences are finite
LOG_SPAN = 100.0  # the largest value over the smallest, above which a curve needs a log scale

Point = tuple[float, float]


def sparkline(values: Iterable[float], width: int) -> str:
    """Return a curve in one line: the mean of the values in each column."""
    # no sum or difference of these is infinite
    known = [max(-LARGEST, min(each, LARGEST)) for each in values if math.isfinite(each)]
    if not known or width < 1:
        return ""
    columns = min(width, len(known))
    ends = [column * len(known) // columns for column in range(columns + 1)]
    means = [fmean(known[one:two]) for one, two in pairwise(ends)]
    low, high = min(means), max(means)
    top = len(BLOCKS) - 1
    if low >= high:
        return BLOCKS[top // 2] * columns
    shares = [(mean - low) / (high - low) for mean in means]
    return "".join(BLOCKS[1 + round(share * (top - 1))] for share in shares)


def line_plot(points: Iterable[Point], *, width: int, height: int) -> list[str]:
    """Return a curve with axes in `height` lines and two more; no line is wider than `width`.

    Values above 0 that span decades are drawn on a log scale, if there is room to say so. Empty without points, or if
    the width is too small to show any.
    """
    known = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if not known or height < 1:
        return []
    values = [y for _, y in known]
    if min(values) > 0 and max(values) / LOG_SPAN > min(values):
        logs = [(x, math.log10(min(y, LARGEST))) for x, y in known]
        plot = _plot(logs, width=width, height=height, x_name="log y", log=True)
        if plot and "log y" in plot[-1]:
            return plot
    return _plot(known, width=width, height=height, x_name="step")


def bar(share: float, width: int) -> str:
    """Return a bar that is full for a share of 1."""
    full = round(min(1.0, max(0.0, share)) * width) if math.isfinite(share) else 0
    return "█" * full + "░" * (width - full)


def divide_width(amounts: Mapping[str, float], width: int) -> dict[str, int]:
    """Divide a width in proportion to amounts: the columns sum to it, and no amount above 0 is without one."""
    total = math.fsum(amounts.values())
    known = [name for name, amount in amounts.items() if amount > 0]
    if total <= 0 or width < len(known):
        return {}
    columns = {name: max(1, round(width * amounts[name] / total)) for name in known}
    while (excess := sum(columns.values()) - width) != 0:
        largest = max(columns, key=lambda name: columns[name])
        columns[largest] -= 1 if excess > 0 else -1
    return columns


def _plot(
    points: Sequence[Point], *, width: int, height: int, x_name: str, log: bool = False
) -> list[str]:
    low, high = _range([y for _, y in points])
    labels = _tick_labels(low, high, height, log=log)
    margin = max(map(len, labels.values()))
    columns = width - margin - 2
    if columns < 2:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    canvas = _Canvas(columns, height)
    canvas.draw([(_share(x, left, right), _share(y, low, high)) for x, y in points])
    rows = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{text}"
        for row, text in enumerate(canvas.rows())
    ]
    first, last = short_number(left), short_number(right)
    between = columns - len(first) - len(last)
    named = f"{x_name:^{between}}" if between >= len(x_name) + 2 else " " * max(1, between)
    below = f"{first}{named}{last}"[:columns]
    return [
        row.rstrip()
        for row in [*rows, f"{'':>{margin}} └{'─' * columns}", f"{'':>{margin}}  {below}"]
    ]


def _tick_labels(low: float, high: float, height: int, *, log: bool) -> dict[int, str]:
    """Return what to write beside rows. On a log scale, `low` and `high` are exponents of 10."""
    ticks = {0: high, height - 1: low}
    if height >= 5:
        ticks[height // 2] = high - (high - low) * (height // 2) / (height - 1)
    if log:
        return {row: short_number(10.0**tick) for row, tick in ticks.items()}
    # Beside the others, a tiny number is 0.
    return {
        row: short_number(tick if abs(tick) > (high - low) * 1e-6 else 0.0)
        for row, tick in ticks.items()
    }


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    low, high = max(low, -LARGEST), min(high, LARGEST)
    if low >= high:
        away = abs(low) * 0.1 or 1.0
        return low - away, low + away
    return low, high


def _share(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


class _Canvas:
    """Dots in characters of Braille: 2 x 4 in each."""

    def __init__(self, columns: int, rows: int) -> None:
        self._cells = [[0] * columns for _ in range(rows)]
        self._width, self._height = columns * 2, rows * 4

    def draw(self, points: Sequence[Point]) -> None:
        """Draw a line through points within (0, 0), at the lower left, and (1, 1)."""
        dots = [
            (round(x * (self._width - 1)), round((1 - y) * (self._height - 1))) for x, y in points
        ]
        self._set(*dots[0])
        for (x, y), (to_x, to_y) in pairwise(dots):
            length = max(abs(to_x - x), abs(to_y - y))
            for position in range(1, length + 1):
                self._set(
                    round(x + (to_x - x) * position / length),
                    round(y + (to_y - y) * position / length),
                )

    def _set(self, x: int, y: int) -> None:
        self._cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]

    def rows(self) -> list[str]:
        return [
            "".join(chr(BRAILLE + cell) if cell else " " for cell in row) for row in self._cells
        ]
