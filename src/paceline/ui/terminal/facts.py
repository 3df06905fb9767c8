"""What is known about one run, as text of a given width: progress, time, nodes, ranks, why it failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from paceline.contract.run_folder import DONE
from paceline.spec.quantities import short_number
from paceline.ui.terminal.plots import bar, line_plot
from paceline.ui.terminal.rows import duration, status_style
from paceline.ui.terminal.run_view import Line, describe_attempt, describe_node, goodput_lines
from paceline.ui.text import plain
from paceline.watch.details import Failure, NodeDetails, RankDetails, RunDetails
from paceline.watch.metrics import Curve
from paceline.watch.overview import Overview
from paceline.watch.run_status import BY_YOU

LABEL = 9  # columns of the names at the left
FOLDER = Console(width=1000)  # folds lines that are too long
TRACEBACK_LINES = 12
MIN_BAR = 5
MAX_NODES = 16  # shown unless the user wants all
MAX_NAMED = 4  # ranks that are named because something is wrong with them
SILENT = 60.0  # seconds without a heartbeat
# A mark and a colour for each state of a rank: nothing depends on the colour alone.
SLOW, QUIET = ("▲", "bold red"), ("!", "bold yellow")
MARKS = {
    "running": ("■", "green"),
    "starting": ("·", "yellow"),
    "finished": ("□", "blue"),
    "stopped": ("□", "yellow"),
    "ended": ("□", "dim"),
}
FRAME = 3  # lines of a plot besides the curve: title, axis, steps


def facts(details: RunDetails, width: int, *, whole: bool = False) -> Text:
    """Return the facts of a run. `whole` leaves nothing out."""
    run = details.overview
    shares = goodput_lines(details.goodput, width=width - LABEL)
    parts = [progress(run, width), labelled(shares)]
    if run.trial is not None and not whole:  # its settings include them
        parts.insert(0, parameters(details.config))
    parts.append(nodes(details.nodes, width, whole=whole))
    if whole or not run.is_over:  # of a run that is over, they are as its agents saw them last
        parts.append(ranks(details.ranks, width, whole=whole))
    failed = failure(details.failure, whole=whole)
    parts = [failed, *parts] if run.is_over and run.status != DONE else [*parts, failed]
    if whole:
        tries = [
            ("" if position else "attempts", Text(f"{each.number} {describe_attempt(each)}"))
            for position, each in enumerate(details.attempts)
        ]
        parts += [labelled(tries), settings(details, width)]
    lines = []
    for line in Text("\n").join(part for part in parts if part.plain).split("\n"):
        pieces = [line] if line.cell_len <= width else line.wrap(FOLDER, width - LABEL)
        lines += [pieces[0], *(Text.assemble(" " * LABEL, each) for each in pieces[1:])]
    return Text("\n").join(lines)


def heading(run: Overview) -> Text:
    """Return which run this is, and how it is."""
    job = f"job {run.job}" if run.job else "local"
    ranks = (
        f"{run.nodes} x {run.nproc} ranks"
        if run.nodes > 1
        else f"{run.nproc} rank{'s' * (run.nproc > 1)}"
    )
    tries = f"attempt {run.attempts}" if run.attempts > 1 else ""
    name = run.key if run.trial is not None else run.name or run.program or run.key
    rest = " · ".join(part for part in (run.key * (name != run.key), job, ranks, tries) if part)
    status = (plain(run.status), f"bold {status_style(run.status, over=run.is_over)}")
    return Text.assemble((plain(name), "bold"), "  ", status, "  ", (plain(rest), "dim"))


def progress(run: Overview, width: int) -> Text:
    lines = []
    if run.detail:
        before = f"{run.status} " if run.detail.startswith(BY_YOU) else ""
        name = "where" if run.status in ("running", "ending", "done") else "why"
        lines.append(label(name, plain(f"{before}{run.detail}")))
    if run.hint:
        lines.append(label("hint", plain(run.hint)))
    if run.starts is not None:
        lines.append(label("starts", time.strftime("about %a %H:%M", time.localtime(run.starts))))
    if run.step is not None:
        lines.append(_step(run, width))
    facts = []
    if run.loss is not None:
        facts.append(f"{plain(run.loss_name)} {short_number(run.loss)}")
    if run.rate is not None:
        facts.append(f"{short_number(run.rate)} {plain(run.rate_unit)}")
    if facts:
        lines.append(label("now" if not run.is_over else "at end", " · ".join(facts)))
    return Text("\n").join(lines)


def _step(run: Overview, width: int) -> Text:
    if not run.total_steps:
        return label("step", f"{run.step:,}")
    share = (run.step or 0) / run.total_steps
    is_known = run.seconds_left is not None and not run.is_over
    left = f" · {duration(run.seconds_left)} left" if is_known else ""
    line = label("step", f"{run.step:,} ")
    text = f" {share:.0%} of {run.total_steps:,}{left}"
    room = width - line.cell_len - len(text)
    return line.append(bar(share, max(MIN_BAR, min(30, room))), "cyan").append(text)


def parameters(config: Mapping[str, object]) -> Text:
    """Return what the trial was given, in one line."""
    text = "  ".join(f"{plain(name)} = {plain(value)}" for name, value in config.items())
    return label("params", text) if text else Text()


def failure(failed: Failure | None, *, whole: bool) -> Text:
    """Return the newest failure, with the end of its traceback."""
    if failed is None:
        return Text()
    who = f"rank {failed.rank} on {plain(failed.host)}: " if failed.rank is not None else ""
    lines = [label("failed", who, "bold red")]
    lines += [label("", plain(line), "red") for line in failed.text.splitlines()]
    traceback = failed.traceback.rstrip().splitlines()
    lines += [
        label("", plain(line), "dim")
        for line in (traceback if whole else traceback[-TRACEBACK_LINES:])
    ]
    return Text("\n").join(lines)


def settings(details: RunDetails, width: int) -> Text:
    lines = [label("command", plain(details.command))] if details.command else []
    lines += [
        label("", f"{plain(name)} = {plain(value)}") for name, value in details.config.items()
    ]
    lines.append(label("folder", plain(details.place)))
    lines += [
        label(plain(name), plain(command), "cyan") for name, command in details.commands.items()
    ]
    return Text("\n").join(lines)


def nodes(found: Sequence[NodeDetails], width: int, *, whole: bool) -> Text:
    """Return a line of bars for each node, by its newest sample."""
    shown = found if whole else found[:MAX_NODES]
    lines: list[Line] = []
    for node in shown:
        newest = [sample for sample in node.samples if "error" not in sample][-1:]
        host = node.host.partition(".")[0]
        now = replace(node, host=host, samples=newest)
        bars = describe_node(now, width=width - LABEL)
        lines.append((f"node {node.node}", bars))
    if len(found) > len(shown):
        lines.append(("", Text(f"and {len(found) - len(shown)} more: press enter to see them")))
    return labelled(lines)


def ranks(found: Sequence[RankDetails], width: int, *, whole: bool) -> Text:
    """Return a map with a mark for each rank, and the names of those that need looking at."""
    if not found:
        return Text()
    room = max(8, (width - LABEL) // 8 * 8)
    lines = []
    for start in range(0, len(found), room):
        line = label("ranks" if start == 0 else "", "")
        for rank in found[start : start + room]:
            line.append(*_mark(rank))
        lines.append(line)
    counts = Counter(rank.state for rank in found)
    text = ", ".join(f"{count} {plain(state)}" for state, count in counts.items())
    pace = max(rank.seconds_per_step for rank in found)
    shown = f"{pace:.2f} s" if pace >= 1 else f"{short_number(round(pace * 1000, 1))} ms"
    lines.append(label("", text + (f" · {shown} per step" if pace > 0 else "")))
    named = [rank for rank in found if _mark(rank) in (SLOW, QUIET)]
    lines += [_problem(rank) for rank in (named if whole else named[:MAX_NAMED])]
    return Text("\n").join(lines)


def _mark(rank: RankDetails) -> tuple[str, str]:
    if rank.is_slow:
        return SLOW
    if rank.state == "running" and rank.age is not None and rank.age > SILENT:
        return QUIET
    return MARKS.get(rank.state, ("?", ""))


def _problem(rank: RankDetails) -> Text:
    where = f" rank {rank.rank} on {plain(rank.host).partition('.')[0]}"
    if rank.is_slow:
        return label("", "").append(*SLOW).append(f"{where} is slow: all others wait for it")
    return label("", "").append(*QUIET).append(f"{where} has been silent for {duration(rank.age)}")


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


def label(name: str, text: str, style: str = "") -> Text:
    """Return a line with a name at its left. Longer lines are wrapped by the pane."""
    shown = plain(name)[: LABEL - 1]
    return Text.assemble((shown.ljust(LABEL), "dim"), (text, style))


def labelled(lines: Iterable[Line]) -> Text:
    """Return lines of `run_view` with their labels."""
    return Text("\n").join(
        Text.assemble(label(name if number == 0 else "", ""), piece)
        for name, text in lines
        for number, piece in enumerate(text.split("\n"))
    )
