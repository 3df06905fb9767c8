"""The ratios of a run as a picture: one bar for each, on a logarithmic scale, with the spread of the repeats."""

from __future__ import annotations

import math
from html import escape

from gpu_parts.result import Result

WIDTH, LEFT, RIGHT, ROW, TOP = 860, 400, 90, 26, 58
GOOD, EQUAL, BAD, INK, GRID = "#2a78b8", "#8a8f98", "#c9562c", "#22262b", "#d9dce1"


def draw(results: list[Result], title: str) -> str:
    """Return an SVG."""
    bars = [(result, peer) for result in results for peer in result.peers]
    spreads = [result.spread(peer) for result, peer in bars]
    high = max([2.0, *(each[1] for each in spreads)])
    low = min([0.8, *(each[0] for each in spreads)])
    span = math.log(high * 1.05) - math.log(low)

    def x(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(ratio) - math.log(low)) / span

    height = TOP + ROW * len(bars) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="14" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        '<text x="14" y="43" fill="#5b616a">How many times as fast as the peer; the line is the spread of the '
        "repeats</text>",
    ]
    for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500):
        if low <= tick <= high:
            parts.append(
                f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{height - 26}" '
                f'stroke="{INK if tick == 1 else GRID}"/>'
                f'<text x="{x(tick):.1f}" y="{height - 10}" text-anchor="middle" fill="#5b616a">{tick:g}x</text>'
            )
    for row, ((result, peer), (worst, best)) in enumerate(zip(bars, spreads, strict=True)):
        y, ratio = TOP + ROW * row + 5, result.ratio(peer)
        colour = EQUAL if 0.98 <= ratio <= 1.02 else GOOD if ratio > 1 else BAD
        start, end = sorted((x(1), x(ratio)))
        text = f"{ratio:.3f}x" if ratio < 2 else f"{ratio:.1f}x"
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(result.name)} vs. {escape(peer)}</text>'
            f'<rect x="{start:.1f}" y="{y}" width="{max(1.5, end - start):.1f}" height="{ROW - 9}" rx="2" '
            f'fill="{colour}"/>'
            f'<line x1="{x(worst):.1f}" x2="{x(best):.1f}" y1="{y + 8.5}" y2="{y + 8.5}" stroke="{INK}"/>'
            f'<text x="{max(x(best), end) + 6:.1f}" y="{y + 13}" font-weight="bold">{text}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
