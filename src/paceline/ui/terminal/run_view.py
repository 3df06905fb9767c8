"""A run's failure, curves and nodes in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.text import Text

from paceline.ui.terminal.plots import bar, line_plot, short_number, sparkline
from paceline.ui.terminal.text import printable, shorten
from paceline.ui.terminal.time_view import Line
from paceline.watch.curves import Curve
from paceline.watch.details import Failure, NodeDetails, RunDetails

PLOT_HEIGHT = 7
MAX_SPARKLINES = 6
TRACEBACK_LINES = 14  # at its end
BAR = 6  # characters
MAX_NODES = 8
NAME_WIDTH = 20
MEASURED = frozenset(
    {
        "seconds",
        "data_wait",
        "samples_per_second",
        "tokens_per_second",
        "tflops_per_second",
        "mfu",
        "peak_memory",
    }
)


def failure_lines(failure: Failure | None) -> list[Line]:
    """Return the end of the traceback of the rank that failed first."""
    if failure is None or not failure.traceback.strip():
        return []
    lines = printable(failure.traceback).rstrip().splitlines()
    shown = lines[-TRACEBACK_LINES:]
    if len(lines) > len(shown):
        shown = ["...", *shown]
    title = Text(
        f"of rank {failure.rank} on {printable(failure.host)}, attempt {failure.attempt}", "red"
    )
    return [("traceback", title), *(("", Text(line, "dim")) for line in shown)]


def curve_lines(curves: Sequence[Curve], *, first: str, width: int, unicode: bool) -> list[Line]:
    """Return a plot of the curve with the name `first`, and a sparkline of each other one."""
    lines: list[Line] = []
    for curve in curves:
        if curve.name == first:
            points = list(zip(curve.steps, curve.values, strict=True))
            plot = line_plot(points, width=width, height=PLOT_HEIGHT, unicode=unicode)
            for number, row in enumerate(plot):
                axis = (
                    len(plot[-2]) - len(plot[-2].lstrip()) + 1 if number < PLOT_HEIGHT else len(row)
                )
                text = Text().append(row[:axis], "dim").append(row[axis:], "green")
                lines.append(("" if number else shorten(curve.name, 10), text))
    others = [curve for curve in curves if curve.name != first and curve.values]
    others.sort(key=lambda curve: curve.name in MEASURED)  # what the script logs comes first
    margin = max(
        (min(NAME_WIDTH, len(printable(curve.name))) for curve in others[:MAX_SPARKLINES]),
        default=0,
    )
    for number, curve in enumerate(others[:MAX_SPARKLINES]):
        value = short_number(curve.values[-1])
        line = sparkline(curve.values, min(40, width - margin - 12), unicode=unicode)
        text = Text(f"{shorten(curve.name, NAME_WIDTH):<{margin}} {value:>9} ").append(line, "cyan")
        lines.append(("metrics" if number == 0 else "", text))
    if hidden := [curve.name for curve in others[MAX_SPARKLINES:]]:
        names = shorten(f"and {len(hidden)} more: {', '.join(hidden)}", width)
        lines.append(("", Text(names, "dim")))
    return lines


def node_lines(details: RunDetails, *, width: int, unicode: bool) -> list[Line]:
    """Return a line of bars for each node, over its newest samples."""
    lines = [
        (f"node {node.node}", _node(node, width=width, unicode=unicode))
        for node in details.nodes[:MAX_NODES]
        if node.samples
    ]
    if len(details.nodes) > MAX_NODES:
        lines.append(("", Text(f"and {len(details.nodes) - MAX_NODES} more nodes", "dim")))
    slow = [rank for rank in details.ranks if rank.is_slow]
    if slow:
        named = ", ".join(f"rank {rank.rank} on {printable(rank.host)}" for rank in slow[:4])
        lines.append(("slow", Text(named, "yellow")))
    return lines


def _node(node: NodeDetails, *, width: int, unicode: bool) -> Text:
    shares: list[tuple[str, float | None]] = [
        ("CPU", _mean(node.samples, "cpu", 100.0)),
        ("memory", _mean(node.samples, "memory", node.memory)),
    ]
    gpus = [gpu for sample in node.samples for gpu in _objects(sample.get("gpus"))]
    if gpus:
        count, memory = len(node.gpus), node.gpus[0].get("memory") if node.gpus else None
        shares += [(f"{count} GPUs" if count > 1 else "GPU", _mean(gpus, "busy", 100.0))]
        shares += [("GPU memory", _mean(gpus, "memory", memory))]
    text = Text(shorten(node.host, NAME_WIDTH))
    margin, length = text.cell_len + 3, text.cell_len
    for name, share in shares:
        if share is not None:
            piece = Text(f"{name} ").append(bar(share, BAR, unicode=unicode), _colour(name, share))
            piece.append(f" {share:.0%}")
            if length + 3 + piece.cell_len > width:
                text.append("\n" + " " * margin)
                length = margin
            else:
                text.append(" · ")
                length += 3
            text.append_text(piece)
            length += piece.cell_len
    return text


def _colour(name: str, share: float) -> str:
    if "memory" in name:
        return "red" if share > 0.95 else "cyan"
    return "yellow" if "GPU" in name and share < 0.3 else "green"


def _mean(samples: Sequence[dict[str, Any]], key: str, whole: Any) -> float | None:
    """Return the mean share of a whole; None if it is not known."""
    if not _is_number(whole) or whole <= 0:
        return None
    known = [sample[key] for sample in samples if _is_number(sample.get(key))]
    return fmean(known) / whole if known else None


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e18
