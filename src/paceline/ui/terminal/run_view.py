"""A run in the terminal, as `paceline show` prints it: its failure, curves, nodes and time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from rich.text import Text

from paceline.spec.quantities import show_seconds
from paceline.ui.terminal.plots import bar, divide_width, line_plot, sparkline
from paceline.ui.text import printable, shorten
from paceline.watch import origin
from paceline.watch.details import AttemptDetails, Failure, NodeDetails, RunDetails
from paceline.watch.goodput import SHARES, UNMEASURED, Goodput, Span
from paceline.watch.metrics import Curve, short_number
from paceline.watch.overview import Overview

Fact = tuple[str, str]  # a label and what stands beside it
Line = tuple[str, Text]

# How each category looks: colour, and a character that tells it apart without colours.
LOOKS = {
    "queued": ("grey50", "░"),
    "starting": ("yellow", "▒"),
    "running": ("blue", "█"),
    "training": ("green", "█"),
    "saving": ("cyan", "▓"),
    "lost": ("red", "x"),
    "idle": ("grey37", "·"),
}
PART_NAMES = {"first_batch": "first batch", "setup": "set-up", "data": "waiting for data"}
MIN_PART = 0.005  # of the wall time: a smaller part is not named
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


def state_facts(run: Overview) -> list[Fact]:
    """Return how a run stands: the most important first."""
    age = 0.0 if run.is_over else origin.age()
    ago = f" {show_seconds(age)} ago" if age else ""
    detail = f" ({run.detail})" if run.detail else ""
    speed = f"{short_number(run.rate)} {run.rate_unit}" if run.rate is not None else ""
    return [
        ("status", f"{run.status}{ago}{detail}"),
        ("hint", run.hint),
        ("step", _progress(run)),
        ("speed", speed),
    ]


def _progress(run: Overview) -> str:
    if run.step is None:
        return ""
    share = (
        f" of {run.total_steps} ({min(1.0, run.step / run.total_steps):.0%})"
        if run.total_steps
        else ""
    )
    left = "" if run.seconds_left is None else f"{show_seconds(run.seconds_left)} left"
    loss = "" if run.loss is None else f"{run.loss_name} {run.loss:.4g}"
    return " · ".join(filter(None, (f"{run.step}{share}", left, loss)))


def config_fact(details: RunDetails) -> Fact:
    """Return the settings that the script has passed, in one line."""
    pairs = (f"{key}={json.dumps(value)}" for key, value in details.config.items())
    return "config", " ".join(pairs)


def failure_lines(failure: Failure | None) -> list[Line]:
    """Return the end of the traceback of the rank that failed first."""
    if failure is None or not failure.traceback.strip():
        return []
    lines = printable(failure.traceback).rstrip().splitlines()
    shown = lines if len(lines) <= TRACEBACK_LINES else ["...", *lines[-TRACEBACK_LINES:]]
    title = Text(
        f"of rank {failure.rank} on {printable(failure.host)}, attempt {failure.attempt}", "red"
    )
    return [("traceback", title), *(("", Text(line, "dim")) for line in shown)]


def plot_lines(curve: Curve, *, width: int, height: int, style: str) -> list[Text]:
    """Return a curve with its axes, which are dim."""
    points = [(float(step), value) for step, value in zip(curve.steps, curve.values, strict=True)]
    rows = line_plot(points, width=width, height=height)
    margin = rows[-2].index("└") + 1 if rows else 0
    lines = []
    for number, row in enumerate(rows):
        axis = margin if number < height else len(row)
        lines.append(Text().append(row[:axis], "dim").append(row[axis:], style))
    return lines


def curve_lines(curves: Sequence[Curve], *, first: str, width: int) -> list[Line]:
    """Return a plot of the curve with the name `first`, and a sparkline of each other one."""
    lines: list[Line] = []
    for curve in curves:
        if curve.name == first:
            rows = plot_lines(curve, width=width, height=PLOT_HEIGHT, style="green")
            names = [shorten(curve.name, 10), *[""] * len(rows)]
            lines += zip(names, rows, strict=False)
    others = [curve for curve in curves if curve.name != first and curve.values]
    others.sort(key=lambda curve: curve.name in MEASURED)  # what the script logs comes first
    margin = max(
        (min(NAME_WIDTH, len(printable(curve.name))) for curve in others[:MAX_SPARKLINES]),
        default=0,
    )
    for number, curve in enumerate(others[:MAX_SPARKLINES]):
        value = short_number(curve.values[-1])
        line = sparkline(curve.values, min(40, width - margin - 12))
        text = Text(f"{shorten(curve.name, NAME_WIDTH):<{margin}} {value:>9} ").append(line, "cyan")
        lines.append(("metrics" if number == 0 else "", text))
    return lines


def node_lines(details: RunDetails, *, width: int, most: int = MAX_NODES) -> list[Line]:
    """Return a line of bars for each node, over its newest samples."""
    lines = [
        (f"node {node.node}", describe_node(node, width=width))
        for node in details.nodes[:most]
        if node.samples
    ]
    if len(details.nodes) > most:
        lines.append(("", Text(f"and {len(details.nodes) - most} more nodes", "dim")))
    slow = [rank for rank in details.ranks if rank.is_slow]
    if slow:
        named = ", ".join(f"rank {rank.rank} on {printable(rank.host)}" for rank in slow[:4])
        lines.append(("slow", Text(named, "yellow")))
    return lines


def describe_node(node: NodeDetails, *, width: int) -> Text:
    """Return bars of what a node uses, as the mean of its samples."""
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
            piece = Text(f"{name} ").append(bar(share, BAR), _colour(name, share))
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


def goodput_lines(goodput: Goodput, *, width: int, with_bar: bool = True) -> list[Line]:
    """Return a bar of all categories, their shares, and how often the run has failed."""
    if goodput.total <= 0:
        return []
    lines: list[Line] = []
    if with_bar:
        bar = Text()
        for name, columns in divide_width(
            {name: goodput.seconds[name] for name in SHARES}, width
        ).items():
            colour, glyph = LOOKS[name]
            bar.append(glyph * columns, colour)
        lines.append(("goodput", bar))
    lines.append(("" if with_bar else "goodput", Text()))
    for entry in _legend(goodput):
        last = lines[-1][1]
        if last and len(last) + 2 + len(entry) > width:
            lines.append(("", entry))
        else:
            last.append("  " if last else "").append_text(entry)
    lines.append(("", Text(_sum(goodput), "dim")))
    return lines


def _legend(goodput: Goodput) -> Iterable[Text]:
    for name in SHARES:
        if goodput.seconds[name] <= 0:
            continue
        colour, glyph = LOOKS[name]
        text = Text().append(glyph, colour)
        text.append(f" {name} {_share(goodput.seconds[name], goodput.total)}")
        parts = {
            PART_NAMES.get(part, part): seconds
            for part, seconds in goodput.parts.get(name, {}).items()
            if seconds >= MIN_PART * goodput.total and seconds < goodput.seconds[name]
        }
        parts.pop("compute" if name == "training" else UNMEASURED, None)
        if parts:
            named = ", ".join(
                f"{part} {_share(seconds, goodput.total)}" for part, seconds in parts.items()
            )
            text.append(f" ({named})", "dim")
        yield text


def _share(seconds: float, total: float) -> str:
    return f"{seconds / total:.0%}" if seconds >= 0.01 * total else "<1%"


def _sum(goodput: Goodput) -> str:
    text = f"of {show_seconds(goodput.total)}"
    if goodput.failures:
        text += f"; {goodput.failures} failure{'s' * (goodput.failures > 1)}"
    return text


def timeline_lines(details: RunDetails, *, width: int) -> list[Line]:
    """Return the run's time from left to right, one line for each attempt, and when its jobs started."""
    spans = details.timeline
    lines: list[Line] = []
    if spans:
        began, ended = spans[0].began, spans[-1].ended
        lines.append(("time line", draw_spans(spans, began, ended, width=width)))
        lines.append(("", _ends(began, ended, width)))
    for attempt in details.attempts:
        lines.append((f"attempt {attempt.number}", Text(describe_attempt(attempt))))
    return lines


def draw_spans(spans: Sequence[Span], began: float, ended: float, *, width: int) -> Text:
    """Return a line whose columns show what most of their time went into; blank where the run was over."""
    text = Text()
    column = (ended - began) / width
    position = 0
    for number in range(width):
        left, right = began + number * column, began + (number + 1) * column
        while position < len(spans) and spans[position].ended <= left:
            position += 1
        shares: dict[str, float] = {}
        for span in spans[position:]:
            if span.began >= right:
                break
            shares[span.kind] = (
                shares.get(span.kind, 0.0) + min(right, span.ended) - max(left, span.began)
            )
        if shares:
            colour, glyph = LOOKS[max(shares, key=lambda each: shares[each])]
            text.append(glyph, colour)
        else:
            text.append(" ")
    return text


def _ends(began: float, ended: float, width: int) -> Text:
    first = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
    same_day = first[:10] == time.strftime("%Y-%m-%d", time.localtime(ended))
    last = time.strftime("%H:%M" if same_day else "%m-%d %H:%M", time.localtime(ended))
    between = width - len(first) - len(last)
    return Text(f"{first}{' ' * between}{last}" if between > 0 else first, "dim")


def describe_attempt(attempt: AttemptDetails) -> str:
    """Return how an attempt ended, and how long it took."""
    verdict = attempt.verdict or (
        "runs" if attempt.ended is None and attempt.began is not None else "no verdict"
    )
    took = ""
    if attempt.began is not None and attempt.ended is not None:
        took = f" after {show_seconds(attempt.ended - attempt.began)}"
    failure = attempt.failure
    if failure is None:
        return printable(f"{verdict}{took}{f': {attempt.reason}' if attempt.reason else ''}")
    host = failure.host or "?"
    who = f"rank {failure.rank} on {host}" if failure.rank is not None else host
    where = f"\nat {failure.where}" if failure.where else ""
    return printable(f"{verdict}{took}: {who}: {failure.text}{where}")
