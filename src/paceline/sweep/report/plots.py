"""The plots of a sweep as SVG, styled by the page: parallel coordinates, history, importances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

from paceline.sweep.report.axes import Scale, linear, round_numbers, scale_of, to_label
from paceline.sweep.report.rows import Row
from paceline.sweep.results import Sweep

MAX_LINES = 600  # in one plot: more would blur it and bloat the page
MAX_DOTS = 3000

# Best, middle, worst: each is visible on white and on black.
RAMP = ((0xE8, 0x59, 0x0C), (0xA6, 0x4A, 0xC9), (0x5B, 0x82, 0xE0))


def colour(share: float) -> str:
    """Return the colour of a rank from 0 (best) to 1 (worst)."""
    position = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    index = min(int(position), len(RAMP) - 2)
    mixed = [
        round(one + (two - one) * (position - index)) for one, two in zip(RAMP[index], RAMP[index + 1], strict=True)
    ]
    return f"#{mixed[0]:02x}{mixed[1]:02x}{mixed[2]:02x}"


def thin_out(ordered: Sequence[Row], limit: int) -> list[tuple[int, Row]]:
    """Return at most `limit` rows with their ranks: the best, and an even share of the rest."""
    if len(ordered) <= limit:
        return list(enumerate(ordered))
    best = limit // 8
    step = (len(ordered) - best) / (limit - best)
    return [
        *enumerate(ordered[:best]),
        *((rank, ordered[rank]) for rank in (best + int(index * step) for index in range(limit - best))),
    ]


def parallel(sweep: Sweep, ordered: Sequence[Row], pruned: Sequence[Row] = ()) -> str:
    """Draw an axis for each parameter and one for the value, and a line for each row, the best on top."""
    everything = [*ordered, *pruned]
    keys = [key for key in sweep.keys if any(key in row.point for row in everything)]
    top, bottom, gap, left = 46, 330, 26, 70
    step = max(110, (900 - 2 * left) // max(1, len(keys)))
    width = left * 2 + step * len(keys)
    scales = [
        scale_of([row.point[key] for row in everything if key in row.point], log=sweep.is_log(key)) for key in keys
    ]
    scales.append(linear(*_in_view([row.value for row in ordered if row.value is not None], sweep.maximizes)))
    partial = [any(key not in row.point for row in everything) for key in keys] + [False]

    def height(axis: int, row: Row) -> float:
        if axis < len(keys) and keys[axis] not in row.point:
            return bottom + gap
        value = row.value if axis == len(keys) else row.point[keys[axis]]
        return bottom - scales[axis].at(value) * (bottom - top)

    drawn = thin_out(ordered, MAX_LINES)
    faint = 0.9 if len(drawn) < 40 else 0.55 if len(drawn) < 200 else 0.35

    def curve(row: Row) -> str:
        dots = [(left + axis * step, height(axis, row)) for axis in range(len(keys) + 1)]
        return _curve(dots, step / 2)

    parts = [
        f'<path class="line early" d="{curve(row)}"><title>{escape(tooltip(sweep, row))}</title></path>'
        for _, row in thin_out(pruned, MAX_LINES)
    ]
    for rank, row in reversed(drawn):
        strong = rank < min(12, max(1, len(ordered) // 20))
        style = f'stroke="{colour(rank / max(1, len(ordered) - 1))}" stroke-opacity="{0.95 if strong else faint}"'
        parts.append(
            f'<path class="line" d="{curve(row)}" {style} stroke-width="{2.2 if strong else 1.2}">'
            f"<title>{escape(tooltip(sweep, row))}</title></path>"
        )
    for axis, name in enumerate([*keys, sweep.metric]):
        parts.append(_axis(left + axis * step, top, bottom, name, scales[axis], last=axis == len(keys)))
        if partial[axis]:
            parts.append(_label(left + axis * step - 8, bottom + gap + 4, "unset", "end", "faint"))
    return _svg(width, bottom + gap + 16, parts, f"parallel coordinates of {len(drawn)} points")


def _curve(dots: Sequence[tuple[float, float]], bend: float) -> str:
    return f"M{dots[0][0]} {dots[0][1]:.1f}" + "".join(
        f"C{x - bend:.0f} {y0:.1f} {x - bend:.0f} {y:.1f} {x} {y:.1f}" for (_, y0), (x, y) in itertools.pairwise(dots)
    )


def _axis(x: float, top: float, bottom: float, name: str, scale: Scale, *, last: bool) -> str:
    side, anchor = (8, "start") if last else (-8, "end")
    parts = [
        f'<line class="axis" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>',
        _label(x, top - 22, name, "middle", "name"),
    ]
    for position, text in scale.marks:
        y = bottom - position * (bottom - top)
        parts.append(f'<line class="axis" x1="{x - 3}" x2="{x + 3}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_label(x + side, y + 4, text, anchor, "mark"))
    return "".join(parts)


def history(sweep: Sweep, ended: Sequence[Row], pruned: Sequence[Row] = ()) -> str:
    """Draw each trial's value as a dot, grey if it was pruned, and the best so far as a line."""
    ordered = sorted(ended, key=lambda row: row.number)
    left, right, top, bottom, width = 70, 20, 16, 250, 900
    low, high = _in_view([row.value for row in ordered if row.value is not None], sweep.maximizes)
    numbers = [row.number for row in (*ordered, *pruned)]
    first, last = min(numbers), max(*numbers, min(numbers) + 1)

    def x(number: int) -> float:
        return left + (number - first) / (last - first) * (width - left - right)

    def y(value: float) -> float:
        return bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - top)

    def dot(row: Row, kind: str) -> str:
        assert row.value is not None
        outside = " outside" if not low <= row.value <= high else ""
        return (
            f'<circle class="{kind}{outside}" cx="{x(row.number):.1f}" cy="{y(row.value):.1f}" r="3">'
            f"<title>{escape(tooltip(sweep, row))}</title></circle>"
        )

    parts = []
    for value in round_numbers(low, high):
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(_label(left - 8, y(value) + 4, to_label(float(value)), "end", "mark"))
    for value in round_numbers(first, last, 8):
        if value == int(value):
            parts.append(_label(x(int(value)), bottom + 20, str(int(value)), "middle", "mark"))
    parts += [dot(row, "early") for row in pruned[:: max(1, len(pruned) // MAX_DOTS)]]
    best, steps = None, []
    every = max(1, len(ordered) // MAX_DOTS)
    for index, row in enumerate(ordered):
        assert row.value is not None
        better = best is None or (row.value > best if sweep.maximizes else row.value < best)
        if better:
            if best is not None:
                steps.append(f"L{x(row.number):.1f} {y(best):.1f}")
            best = row.value
            steps.append(f"{'L' if steps else 'M'}{x(row.number):.1f} {y(best):.1f}")
        if better or index % every == 0:
            parts.append(dot(row, "dot"))
    assert best is not None
    steps.append(f"L{x(last):.1f} {y(best):.1f}")
    parts.append(f'<path class="best" d="{"".join(steps)}"/>')
    parts.append(_label((left + width - right) / 2, bottom + 40, "trial", "middle", "name"))
    return _svg(width, bottom + 50, parts, "values in the order of the trials")


def _in_view(values: list[float], maximizes: bool) -> tuple[float, float]:
    """Return the range to show, without outliers at the bad end that would squeeze the rest."""
    ordered = sorted(values, reverse=maximizes)
    typical = ordered[int(0.9 * (len(ordered) - 1))]
    worst = ordered[-1]
    if abs(worst - typical) > 3 * abs(typical - ordered[0]) > 0:
        worst = typical + 0.3 * (typical - ordered[0])
    low, high = min(ordered[0], worst), max(ordered[0], worst)
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def bars(shares: dict[str, float]) -> str:
    """Draw importances as bars, largest first."""
    left, width, height = 170, 900, 30
    longest = max(shares.values())
    parts = []
    for index, (name, share) in enumerate(shares.items()):
        y = 8 + index * height
        length = max(1.0, share / longest * (width - left - 70))
        parts.append(_label(left - 10, y + 15, _short(name, 22), "end", "name"))
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{length:.1f}" height="{height - 10}" rx="3"/>')
        parts.append(_label(left + length + 8, y + 15, f"{share:.0%}", "start", "mark"))
    return _svg(width, 16 + height * len(shares), parts, "importance of each parameter")


def tooltip(sweep: Sweep, row: Row) -> str:
    """Return the tooltip of a row's line or dot."""
    lines = [f"trial {row.number}{' (pruned)' if row.is_pruned else ''}: {sweep.metric} {value_text(row)}"]
    return "\n".join([*lines, *(f"{key} = {to_label(value)}" for key, value in row.point.items())])


def value_text(row: Row, digits: int = 5) -> str:
    """Return a row's value; for repeats, the mean, the deviation and their number."""
    if row.value is None:
        return ""
    if len(row.trials) == 1:
        return f"{row.value:.{digits}g}"
    spread = f" ± {row.deviation:.2g}" if row.deviation is not None else ""
    return f"{row.value:.{digits}g}{spread} (n={row.count})"


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _label(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(_short(text, 24))}</text>'


def _svg(width: float, height: float, parts: Sequence[str], about: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" style="min-width:{0.7 * width:.0f}px"'
    return f'<svg {size} role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'
