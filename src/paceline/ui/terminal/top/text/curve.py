"""The curve of a metric, drawn with Braille characters: eight dots in each cell of the terminal."""

from __future__ import annotations

from rich.text import Text

from paceline.ui.terminal.top.text.words import plain, short_number
from paceline.watch.metrics.curves import Curve

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a cell, by row and column
AXIS = 8  # columns of the numbers at the left


def plot(curve: Curve, width: int, height: int, *, style: str = "cyan") -> Text:
    """Return a plot this wide and high, with its name, the ends of both axes and the last value."""
    columns, rows = width - AXIS, height - 2
    if columns < 4 or rows < 1 or not curve.values:
        return Text(plain(curve.name))
    low, high = min(curve.values), max(curve.values)
    title = Text.assemble((plain(curve.name), "bold"), f" {short_number(curve.values[-1])}")
    if low != curve.values[-1]:
        title.append(f"  lowest {short_number(low)}", "dim")
    lines = [title]
    for number, dots in enumerate(_draw(curve, columns, rows, low, high)):
        label = short_number(high) if number == 0 else short_number(low) if number == rows - 1 else ""
        lines.append(Text.assemble((f"{label:>{AXIS - 1}} ", "dim"), (dots, style)))
    first, last = f"{curve.steps[0]:,}", f"step {curve.steps[-1]:,}"
    lines.append(Text(f"{' ' * AXIS}{first}{last:>{max(0, columns - len(first))}}", "dim"))
    for line in lines:
        line.truncate(width)
    return Text("\n").join(lines)


def _draw(curve: Curve, columns: int, rows: int, low: float, high: float) -> list[str]:
    """Return the dots of the points and of the lines between them."""
    across, down = 2 * columns - 1, 4 * rows - 1
    begin, span = curve.steps[0], max(1, curve.steps[-1] - curve.steps[0])
    extent = high - low or 1.0
    cells = [[0] * columns for _ in range(rows)]
    last: tuple[int, int] | None = None
    for step, value in zip(curve.steps, curve.values, strict=True):
        x = min(across, max(0, round((step - begin) / span * across)))
        y = min(down, max(0, round((high - value) / extent * down)))
        if (x, y) == last:
            continue
        for dot_x, dot_y in _between(last or (x, y), (x, y)):
            cells[dot_y // 4][dot_x // 2] |= DOTS[dot_y % 4][dot_x % 2]
        last = (x, y)
    return ["".join(chr(BLANK + bits) for bits in line) for line in cells]


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(count + 1)]
