"""The table of runs as text: its rows, its columns, and the titles above it and above the log.

Live runs come first, and the trials of a sweep are in one row that unfolds. Columns that matter less
are left out of a narrow terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import quote
from paceline.sweep.report import SweepOverview
from paceline.ui.terminal.plots import bar
from paceline.ui.text import plain
from paceline.watch import origin
from paceline.watch.metrics import short_number
from paceline.watch.overview import Overview

WAITING = frozenset({"queued", "held", "starting", "prepared"})
MAX_ROWS = 2000


@dataclass(frozen=True)
class Row:
    """A run, or a sweep with its trials."""

    key: str  # the path of the run's or the sweep's folder
    run: Overview | None
    sweep: SweepOverview | None = None
    trials: tuple[Overview, ...] = field(default=(), repr=False)  # those that have started
    is_trial: bool = False
    is_open: bool = False  # the trials follow

    @property
    def name(self) -> str:
        if self.sweep is not None:
            return self.sweep.name
        assert self.run is not None
        if self.is_trial:
            return f"trial {self.run.trial}" if self.run.trial is not None else self.run.run_id
        return self.run.name or self.run.program.rpartition("/")[2] or self.run.run_id

    @property
    def created(self) -> float:
        known = [each.created or 0.0 for each in (self.run, self.sweep, *self.trials) if each]
        return max(known)

    @property
    def status(self) -> str:
        return self._overview.status

    @property
    def is_over(self) -> bool:
        return self._overview.is_over

    @property
    def _overview(self) -> Overview | SweepOverview:
        overview = self.run or self.sweep
        assert overview is not None
        return overview

    @property
    def counts(self) -> str:
        """How many trials are in which state: `3 running, 40 done`."""
        assert self.sweep is not None
        found = self.sweep.counts
        ordered = sorted(found, key=lambda state: (state != "running", state != "pending"))
        return ", ".join(f"{found[state]} {state}" for state in ordered)


def liveliness(run: Overview | Row) -> int:
    """Return a number that is smaller the more a run or a sweep needs looking at."""
    return 2 if run.is_over else 1 if run.status in WAITING else 0


def arrange(
    runs: Iterable[Overview],
    sweeps: Iterable[SweepOverview] = (),
    *,
    unfolded: Collection[str] = (),
    wanted: str = "",
) -> list[Row]:
    """Return the rows of what matches the filter: running runs, queued ones, then all others, newest first."""
    known = {sweep.path: sweep for sweep in sweeps}
    trials: dict[str, list[Overview]] = {
        path: []
        for path, sweep in known.items()
        if _has_words(wanted, (sweep.name, sweep.project, sweep.status, "sweep"))
    }
    rows = []
    for run in runs:
        sweep_path = run.path.rpartition("/trials/")[0] if run.sweep else ""
        if sweep_path in trials or (sweep_path in known and matches(run, wanted)):
            trials.setdefault(sweep_path, []).append(run)
        elif sweep_path not in known and matches(run, wanted):
            rows.append(Row(run.path, run))
    for key, found in trials.items():
        ordered = tuple(sorted(found, key=lambda run: run.trial or 0))
        rows.append(Row(key, None, known[key], ordered, is_open=key in unfolded))
    rows.sort(key=lambda row: (liveliness(row), -row.created))
    listed = []
    for row in rows[:MAX_ROWS]:
        trials_of = sorted(row.trials, key=liveliness) if row.is_open else []
        listed += [row, *(Row(run.path, run, is_trial=True) for run in trials_of)]
    return listed


def matches(run: Overview, wanted: str) -> bool:
    """Return whether a run has all the words of a filter in its names, its status or its job."""
    words = (
        run.run_id,
        run.name,
        run.project,
        run.experiment,
        run.sweep,
        run.program,
        run.status,
        run.job,
        run.detail,
    )
    return _has_words(wanted, words)


def _has_words(wanted: str, words: Iterable[str]) -> bool:
    text = "\n".join(words).lower()
    return all(word in text for word in wanted.lower().split())


def summary(runs: Iterable[Overview]) -> str:
    """Return how many runs are live and how many are over."""
    found = Counter(
        "over" if run.is_over else "queued" if run.status in WAITING else "running" for run in runs
    )
    return " · ".join(
        f"{found[name]} {name}" for name in ("running", "queued", "over") if found[name]
    )


# -- columns ---------------------------------------------------------------------------------------


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
    rank: int  # the higher, the sooner it is left out
    right: bool = False


def status_style(status: str, *, over: bool) -> str:
    if status in WAITING:
        return "yellow"
    return COLOURS.get(status, "red" if over else "cyan")


def progress_cell(run: Overview) -> Text:
    if run.step is None:
        return Text()
    if not run.total_steps:
        return Text(f"{run.step:,}".rjust(14))
    share = run.step / run.total_steps
    return Text.assemble((bar(share, 9), "cyan" if not run.is_over else "dim"), f"{share:5.0%}")


def cells(run: Overview) -> dict[str, str]:
    """Return what tables say about a run, by the titles of their columns."""
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    left = "" if run.seconds_left is None else show_seconds(run.seconds_left)
    if run.starts is not None:
        left = time.strftime("~%H:%M", time.localtime(run.starts))
    loss = "" if run.loss is None else short_number(run.loss)
    now = origin.now()
    has_rate = run.rate is not None and not run.is_over
    return {
        "RUN": run.key,
        "STATUS": run.status,
        "JOB": run.job,
        "RANKS": f"{run.nodes} x {run.nproc}",
        "ATTEMPT": str(run.attempts or ""),
        "STEP": "" if run.step is None else f"{run.step}{total}",
        "LEFT": "" if run.is_over else left,
        # a number that is cut would be another one
        "LOSS": loss if len(loss) <= LOSS_WIDTH else f"{run.loss:.1e}",
        "RATE": f"{short_number(run.rate or 0.0)} {run.rate_unit}" if has_rate else "",
        "GOODPUT": "" if run.goodput is None else f"{run.goodput:.0%}",
        "AGE": show_seconds(max(0.0, now - (run.created or now))),
        "PROGRAM": run.name or run.program,
        "WHERE / WHY": run.detail,
    }


COLUMNS = (
    Column("STATUS", STATUS_WIDTH, 0),
    Column("PROGRESS", 14, 1),
    Column("LOSS", LOSS_WIDTH, 2, right=True),
    Column("LEFT", 7, 3, right=True),
    Column("RATE", 15, 7, right=True),
    Column("GOODPUT", 7, 5, right=True),
    Column("JOB", 9, 6),
    Column("RANKS", 7, 8, right=True),
    Column("AGE", 7, 9, right=True),
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
    shown = {name: Text(plain(text)) for name, text in cells(row.run).items()}
    shown["STATUS"].stylize(status_style(row.run.status, over=row.run.is_over))
    shown["PROGRESS"] = progress_cell(row.run)
    for column in chosen.columns:
        cell = shown[column.title]
        if column.right:
            cell.truncate(column.width)
            cell.pad_left(column.width - cell.cell_len)
        _add(line, cell, column.width)
    why = Text(shown["WHERE / WHY"].plain if chosen.why else "", "dim")
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
