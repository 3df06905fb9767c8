"""Curves of a proof as SVG: losses on top of each other, and how far each is from its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from paceline.sweep.report.numbers import round_numbers, to_label

# Told apart on white and on black, and by most people who see colours differently.
COLOURS = ("#2f7fd6", "#e8590c", "#2f9e5b", "#a64ac9", "#c99a1d", "#d1383d", "#0ca5b0", "#8a93a0")
DASHES = ("", "7 4", "2 3", "10 3 2 3", "1 4", "12 4")

# For a picture on its own; in the report, the page's style says the same for light and dark.
STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1b1f24}.mark{font-size:11px}.name{font-weight:600}"
    ".grid{stroke:#d5dae1}.line{fill:none}.limit{stroke:#d1383d;stroke-dasharray:4 4}</style>"
)
LEFT, RIGHT, TOP, BOTTOM, WIDTH = 76, 20, 18, 300, 900
ROW = 22  # of the legend
LONG_NAME = 32  # characters; longer ones get a wider column


@dataclass(frozen=True)
class Curve:
    """A line: its name, and its values by position."""

    name: str
    points: Mapping[int, float]


@dataclass(frozen=True)
class Axes:
    """Maps positions and values to the picture."""

    first: float
    last: float
    low: float
    high: float
    log: bool = False

    def x(self, position: float) -> float:
        return LEFT + (position - self.first) / ((self.last - self.first) or 1.0) * (
            WIDTH - LEFT - RIGHT
        )

    def y(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return BOTTOM - (min(max(value, self.low), self.high) - self.low) / (
            self.high - self.low
        ) * (BOTTOM - TOP)


def draw_losses(curves: Sequence[Curve], *, across: str = "step") -> str:
    """Draw losses on top of each other. The first curve is wide and pale, so that equal ones are seen on it."""
    values = [value for curve in curves for value in curve.points.values() if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.5
    axes = Axes(*_range(curves), low - margin, high + margin)
    marks = [(value, to_label(float(value))) for value in round_numbers(axes.low, axes.high)]
    return _draw(curves, axes, marks, across=across, up="loss", has_reference=True)


def draw_differences(curves: Sequence[Curve], limit: float) -> str:
    """Draw how far each curve is from its reference, on a logarithmic axis. Zeros are on the bottom line."""
    values = [
        value
        for curve in curves
        for value in curve.points.values()
        if value > 0 and math.isfinite(value)
    ]
    low = math.floor(math.log10(min([*values, limit or 1.0]))) - 1
    high = math.ceil(math.log10(max([*values, limit or 1e-16]))) + 1
    axes = Axes(*_range(curves), low, high, log=True)
    every = max(1, round((high - low) / 6))
    marks = [(10.0**power, f"1e{power}") for power in range(int(low) + 1, high, every)]
    line = f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axes.y(limit):.1f}" y2="{axes.y(limit):.1f}"/>'
    extra = (
        [line, _label(WIDTH - RIGHT, axes.y(limit) - 5, f"allowed: {limit:g}", "end", "mark")]
        if limit
        else []
    )
    extra.append(_label(LEFT - 8, BOTTOM + 4, "0", "end", "mark"))
    return _draw(curves, axes, marks, across="step", up="difference of losses", extra=extra)


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    positions = [position for curve in curves for position in curve.points] or [0, 1]
    return min(positions), max(positions)


def _draw(
    curves: Sequence[Curve],
    axes: Axes,
    marks: Sequence[tuple[float, str]],
    *,
    across: str,
    up: str,
    has_reference: bool = False,
    extra: Sequence[str] = (),
) -> str:
    parts = []
    for value, text in marks:
        y = axes.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_label(LEFT - 8, y + 4, text, "end", "mark"))
    for value in (
        round_numbers(axes.first, axes.last, 8) if axes.last > axes.first else [axes.first]
    ):
        if value == int(value):
            parts.append(_label(axes.x(value), BOTTOM + 20, f"{int(value):,}", "middle", "mark"))
    parts += extra
    columns = 3 if all(len(curve.name) <= LONG_NAME for curve in curves) else 2
    for number, curve in enumerate(curves):
        # A run has the same colour in both pictures; the reference is only in one of them.
        style = _style(number if has_reference else number + 1, wide=has_reference and number == 0)
        parts.append(
            f'<path class="line" d="{_path(curve, axes)}" {style}><title>{escape(curve.name)}</title></path>'
        )
        x, y = LEFT + number % columns * (825 // columns), BOTTOM + 62 + number // columns * ROW
        parts.append(
            f'<path class="line" d="M{x} {y}h34" {style}/>'
            + _label(x + 42, y + 4, curve.name, "start", "")
        )
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, BOTTOM + 38, across, "middle", "name"))
    parts.append(_label(4, 12, up, "start", "name"))
    height = BOTTOM + 62 + -(-len(curves) // columns) * ROW
    size = f'viewBox="0 0 {WIDTH} {height}" style="min-width:{0.7 * WIDTH:.0f}px"'
    about = escape(f"{up} by {across} of {len(curves)} runs")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}">{"".join(parts)}</svg>'


def _style(number: int, *, wide: bool) -> str:
    colour = COLOURS[number % len(COLOURS)]
    if wide:
        return f'stroke="{colour}" stroke-width="7" stroke-opacity=".35"'
    dash = DASHES[number % len(DASHES)]
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _path(curve: Curve, axes: Axes) -> str:
    dots = [
        (axes.x(at), axes.y(value))
        for at, value in sorted(curve.points.items())
        if math.isfinite(value)
    ]
    return (
        "".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(dots))
        or "M0 0"
    )


def _label(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def stand_alone(svg: str) -> str:
    """Return a picture as a file of its own: with a style and a background."""
    begin, rest = svg.split(">", 1)
    return f'{begin}>{STYLE}<rect width="100%" height="100%" fill="#fff"/>{rest}\n'
