"""The curve of a metric, with its name and its last value."""

from __future__ import annotations

from rich.text import Text

from paceline.ui.terminal.plots import line_plot, short_number
from paceline.ui.terminal.top.text.words import plain
from paceline.watch.curves import Curve

FRAME = 3  # lines of a plot besides the curve: title, axis, steps


def plot(curve: Curve, width: int, height: int, *, style: str = "cyan") -> Text:
    """Return a plot of at most this width and height."""
    title = Text(plain(curve.name), "bold")
    if curve.values:
        last, lowest = curve.values[-1], min(curve.values)
        title = Text.assemble((plain(curve.name), "bold"), f" {short_number(last)}")
        if lowest != last:
            title.append(f"  lowest {short_number(lowest)}", "dim")
    title.truncate(max(0, width), overflow="ellipsis")
    points = list(zip(map(float, curve.steps), curve.values, strict=True))
    lines = [Text(line) for line in line_plot(points, width=width, height=max(0, height - FRAME))]
    for number, line in enumerate(lines):
        edge = (
            len(line.plain)
            if number >= len(lines) - 2
            else max(line.plain.find(each) for each in "┤│") + 1
        )
        line.stylize("dim", 0, edge)
        line.stylize(style, edge)
    return Text("\n").join([title, *lines])
