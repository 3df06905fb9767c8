"""The table of runs as text, and the titles above it and above the log.

Columns that matter less are left out of a narrow terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import quote
from paceline.ui.terminal.plots import bar, short_number
from paceline.ui.terminal.rows import WAITING, Row, summary
from paceline.ui.terminal.text import plain
from paceline.watch import origin
from paceline.watch.overview import Overview

GAP = 1
MIN_WHY = 14  # for which columns that matter less are left out
LEAST_WHY = 8  # what is narrower tells nothing
MATTERS = 3  # the last rank that matters more than where and why
STATUS_WIDTH, LOSS_WIDTH = 9, 8
COLOURS = {
    "running": "green",
    "done": "blue",
    "failed": "red",
    "lost": "red",
    "cancelled": "dim",
    "stopped": "yellow",
}


@dataclass(frozen=True)
class Column:
    title: str
    width: int
    cell: Callable[[Overview], Text | str]
    rank: int  # the higher, the sooner it is left out
    right: bool = False


def status_style(status: str, *, over: bool) -> str:
    if status in WAITING:
        return "yellow"
    return COLOURS.get(status, "red" if over else "cyan")


def duration(seconds: float | None) -> str:
    return "" if seconds is None or not math.isfinite(seconds) else show_seconds(max(0.0, seconds))


def progress_cell(run: Overview) -> Text:
    if run.step is None:
        return Text()
    if not run.total_steps:
        return Text(f"{run.step:,}".rjust(14))
    share = run.step / run.total_steps
    return Text.assemble((bar(share, 9), "cyan" if not run.is_over else "dim"), f"{share:5.0%}")


def _loss(run: Overview) -> str:
    """Return the loss in the width of its column: a number that is cut would be another one."""
    text = "" if run.loss is None else short_number(run.loss)
    return text if len(text) <= LOSS_WIDTH else f"{run.loss:.1e}"


def _left(run: Overview) -> str:
    if run.is_over:
        return ""
    if run.starts is not None:
        return time.strftime("~%H:%M", time.localtime(run.starts))
    return duration(run.seconds_left)


def _rate(run: Overview) -> str:
    return "" if run.rate is None or run.is_over else f"{short_number(run.rate)} {run.rate_unit}"


def _goodput(run: Overview) -> str:
    return "" if run.goodput is None else f"{run.goodput:.0%}"


def _age(run: Overview) -> str:
    return "" if run.created is None else duration(origin.now() - run.created).partition(" ")[0]


COLUMNS = (
    Column(
        "STATUS",
        STATUS_WIDTH,
        lambda run: Text(plain(run.status), status_style(run.status, over=run.is_over)),
        0,
    ),
    Column("PROGRESS", 14, progress_cell, 1),
    Column("LOSS", LOSS_WIDTH, _loss, 2, right=True),
    Column("LEFT", 7, _left, 3, right=True),
    Column("RATE", 15, _rate, 7, right=True),
    Column("GOODPUT", 7, _goodput, 5, right=True),
    Column("JOB", 9, lambda run: plain(run.job), 6),
    Column("RANKS", 6, lambda run: f"{run.nodes}x{run.nproc}", 8, right=True),
    Column("AGE", 5, _age, 9, right=True),
)


@dataclass(frozen=True)
class Fit:
    """The columns that fit, and the widths of the first and the last one, which share what is left."""

    columns: tuple[Column, ...]
    name: int
    why: int


def fit(width: int) -> Fit:
    """Choose the columns for a terminal this wide."""
    chosen = list(COLUMNS)
    name = 26 if width >= 100 else 20 if width >= 64 else 16
    while chosen:
        last = max(chosen, key=lambda column: column.rank)
        if _rest(chosen, width, name) >= (MIN_WHY if last.rank > MATTERS else 0):
            break
        chosen.remove(last)
    rest = max(0, _rest(chosen, width, name))
    return (
        Fit(tuple(chosen), name, rest) if rest >= LEAST_WHY else Fit(tuple(chosen), name + rest, 0)
    )


def _rest(chosen: list[Column], width: int, name: int) -> int:
    return width - name - sum(column.width + GAP for column in chosen) - GAP


def title_line(chosen: Fit) -> Text:
    line = Text(style="bold dim")
    _add(line, Text("RUN"), chosen.name)
    for column in chosen.columns:
        title = column.title.rjust(column.width) if column.right else column.title
        _add(line, Text(title), column.width)
    return line.append("WHERE / WHY"[: chosen.why])


def row_line(row: Row, chosen: Fit) -> Text:
    """Return a row as one line of text, as wide as the columns together."""
    line = Text()
    _add(line, _name(row, chosen.name), chosen.name)
    if row.run is None:
        width = sum(column.width + GAP for column in chosen.columns) + chosen.why
        return line.append_text(_sweep(row, width))
    for column in chosen.columns:
        cell = column.cell(row.run)
        cell = Text(cell) if isinstance(cell, str) else cell
        if column.right:
            cell.truncate(column.width)
            cell.pad_left(column.width - cell.cell_len)
        _add(line, cell, column.width)
    why = Text(plain(row.run.detail) if chosen.why else "", "dim")
    why.truncate(chosen.why, overflow="ellipsis")
    return line.append_text(why)


def _name(row: Row, width: int) -> Text:
    mark = ("▾ " if row.is_open else "▸ ") if row.run is None else "    " if row.is_trial else "  "
    text = Text(mark)
    if row.run is None or row.is_trial:
        return text.append(plain(row.name), "bold" if row.run is None else "")
    tail = row.run.run_id.rpartition("-")[2][-4:]
    name = Text(plain(row.name))
    name.truncate(max(4, width - len(mark) - len(tail) - 1), overflow="ellipsis")
    return text.append_text(name).append(f" {plain(tail)}", "dim")


def _sweep(row: Row, width: int) -> Text:
    assert row.sweep is not None
    waiting = sum(row.sweep.counts.get(state, 0) for state in ("running", "pending"))
    share = 1 - waiting / row.sweep.trials if row.sweep.trials else 0.0
    status = Text(plain(row.status), status_style(row.status, over=row.is_over))
    status.truncate(STATUS_WIDTH, overflow="ellipsis", pad=True)
    line = Text.assemble(
        status, " ", (bar(share, 9), "magenta"), f"{share:5.0%} ", (plain(row.counts), "dim")
    )
    if row.sweep.best is not None:
        line.append(f"  best {plain(row.sweep.metric)} {short_number(row.sweep.best)}")
    line.truncate(width, overflow="ellipsis")
    return line


def _add(line: Text, cell: Text, width: int) -> None:
    cell.truncate(width, overflow="ellipsis", pad=True)
    line.append_text(cell)
    line.append(" " * GAP)


def list_title(runs: Iterable[Overview], wanted: str, scratch: Path) -> Text:
    filtered = (f"  filter: {plain(wanted)}" if wanted else "", "yellow")
    copy, status = origin.shown(), origin.status()
    if copy is not None and status:  # one line has to say what to do, also in a narrow terminal
        status = f"{status.partition(';')[0]}: paceline login {quote(copy.cluster)}"
    problem = (f"  {plain(status)}" if status else "", "bold red")
    # The cluster comes first, since a narrow terminal cuts off the end. A problem names it as well.
    there = f" --on {plain(quote(copy.cluster))}" if copy is not None and not status else ""
    where = (f"  {plain(origin.place(scratch))}", "dim")
    title = (f"paceline top{there}", "bold")
    return Text.assemble(title, f"  {summary(runs)}", filtered, problem, where)


def log_title(count: int, searched: str) -> Text:
    lines = f"  {count:,} line{'s' * (count != 1)}" if count else ""
    text = Text.assemble(("log", "bold"), (lines, "dim"))
    if searched:
        text.append(f" with {plain(searched)!r}", "yellow").append("  escape: all lines", "dim")
    return text
