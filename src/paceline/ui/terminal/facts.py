"""What `paceline top` shows of one run, as text of a given width: what `show` prints, and a map of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from paceline.contract.run_folder import DONE
from paceline.ui.terminal.rows import status_style
from paceline.ui.terminal.run_view import (
    Fact,
    Line,
    config_fact,
    describe_attempt,
    failure_lines,
    goodput_lines,
    node_lines,
    plot_lines,
    state_facts,
)
from paceline.ui.text import plain
from paceline.watch.details import NodeDetails, RankDetails, RunDetails
from paceline.watch.metrics import Curve, short_number, show_step
from paceline.watch.overview import Overview

LABEL = 10  # columns of the names at the left
FOLDER = Console(width=1000)  # folds lines that are too long
MAX_NODES = 16  # shown unless the user wants all
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
    run, room = details.overview, width - LABEL
    lines = _lines(state_facts(run))
    if whole or run.trial is not None:
        lines += _lines([config_fact(details)])
    lines += goodput_lines(details.goodput, width=room)
    now = replace(details, nodes=[_newest(node) for node in details.nodes])
    lines += node_lines(now, width=room, most=len(now.nodes) if whole else MAX_NODES)
    if whole or not run.is_over:  # of a run that is over, they are as its agents saw them last
        lines += rank_lines(details.ranks, room)
    failed = failure_lines(details.failure)
    lines = [*failed, *lines] if run.is_over and run.status != DONE else [*lines, *failed]
    if whole:
        tries = [(f"attempt {each.number}", describe_attempt(each)) for each in details.attempts]
        asked = [("command", details.command), ("folder", details.place)]
        lines += _lines([*tries, *asked, *details.commands.items()])
    shown = []
    for name, text in lines:
        for number, piece in enumerate(text.wrap(FOLDER, room) or [Text()]):
            label = plain(name)[: LABEL - 1] if number == 0 else ""
            shown.append(Text.assemble((label.ljust(LABEL), "dim"), piece))
    return Text("\n").join(shown)


def _lines(facts: Sequence[Fact]) -> list[Line]:
    return [
        (name if number == 0 else "", Text(plain(line)))
        for name, text in facts
        for number, line in enumerate(text.splitlines())
    ]


def _newest(node: NodeDetails) -> NodeDetails:
    """Return a node with its newest sample alone."""
    samples = [sample for sample in node.samples if "error" not in sample]
    return replace(node, host=node.host.partition(".")[0], samples=samples[-1:])


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


def rank_lines(found: Sequence[RankDetails], room: int) -> list[Line]:
    """Return a map with a mark for each rank, and how many are in which state."""
    if not found:
        return []
    room = max(8, room // 8 * 8)
    lines: list[Line] = []
    for start in range(0, len(found), room):
        row = Text.assemble(*map(_mark, found[start : start + room]))
        lines.append(("ranks" if start == 0 else "", row))
    counts = Counter(rank.state for rank in found)
    text = ", ".join(f"{count} {plain(state)}" for state, count in counts.items())
    pace = max(rank.seconds_per_step for rank in found)
    return [*lines, ("", Text(text + (f" · {show_step(pace)} per step" if pace > 0 else "")))]


def _mark(rank: RankDetails) -> tuple[str, str]:
    if rank.is_slow:
        return SLOW
    if rank.state == "running" and rank.age is not None and rank.age > SILENT:
        return QUIET
    return MARKS.get(rank.state, ("?", ""))


def plot(curve: Curve, width: int, height: int, *, style: str = "cyan") -> Text:
    """Return a plot of at most this width and height."""
    title = Text(plain(curve.name), "bold")
    if curve.values:
        last, lowest = curve.values[-1], min(curve.values)
        title = Text.assemble((plain(curve.name), "bold"), f" {short_number(last)}")
        if lowest != last:
            title.append(f"  lowest {short_number(lowest)}", "dim")
    title.truncate(max(0, width), overflow="ellipsis")
    return Text("\n").join(
        [title, *plot_lines(curve, width=width, height=max(0, height - FRAME), style=style)]
    )
