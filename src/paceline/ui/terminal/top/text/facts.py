"""What is known about one run, as text of a given width: progress, time, nodes, ranks, why it failed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.text import Text

from paceline.contract.verdict import DONE
from paceline.ui.terminal.plots import bar, divide_width, short_number
from paceline.ui.terminal.time_view import glyph
from paceline.ui.terminal.top.text.columns import status_style
from paceline.ui.terminal.top.text.labels import LABEL, fold, label
from paceline.ui.terminal.top.text.machines import nodes, ranks
from paceline.ui.terminal.top.text.words import duration, plain
from paceline.watch import origin
from paceline.watch.details import AttemptDetails, Failure, GoodputDetails, RunDetails
from paceline.watch.overview import Overview
from paceline.watch.reasons import BY_YOU

TRACEBACK_LINES = 12
MIN_BAR = 5
# What counts is green, what was wasted red. Without colours, characters tell them apart.
SHARE_COLOURS = {
    "training": "green",
    "running": "green",
    "compute": "green",
    "saving": "cyan",
    "starting": "yellow",
    "queued": "bright_black",
    "lost": "red",
    "idle": "magenta",
    "data": "yellow",
}


def facts(details: RunDetails, width: int, *, whole: bool = False) -> Text:
    """Return the facts of a run. `whole` leaves nothing out."""
    run = details.overview
    parts = [progress(run, width), goodput(details.goodput, run.goodput, width)]
    if run.trial is not None and not whole:  # its settings include them
        parts.insert(0, parameters(details.config))
    parts.append(nodes(details.nodes, width, whole=whole))
    if whole or not run.is_over:  # of a run that is over, they are as its agents saw them last
        parts.append(ranks(details.ranks, width, whole=whole))
    failed = failure(details.failure, whole=whole)
    parts = [failed, *parts] if run.is_over and run.status != DONE else [*parts, failed]
    if whole:
        parts += [attempts(details.attempts, is_over=run.is_over), settings(details, width)]
    lines = [line for part in parts if part.plain for line in part.split("\n")]
    return Text("\n").join(folded for line in lines for folded in fold(line, width))


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
    left = (
        f" · {duration(run.seconds_left)} left"
        if run.seconds_left is not None and not run.is_over
        else ""
    )
    line = label("step", f"{run.step:,} ")
    text = f" {share:.0%} of {run.total_steps:,}{left}"
    if width - line.cell_len - len(text) < MIN_BAR:
        text = f" {share:.0%}{left}"
    return line.append(
        bar(share, max(MIN_BAR, min(30, width - line.cell_len - len(text)))), "cyan"
    ).append(text)


def goodput(found: GoodputDetails, share: float | None, width: int) -> Text:
    """Return a bar of where the time went, and the largest parts in words. `share` is that of steps that count."""
    known = {name: value for name, value in found.seconds.items() if value > 0}
    total = sum(known.values())
    if total <= 0:
        return Text()
    text = f" {f'{share:.0%} of ' if share is not None else ''}{duration(total)}"
    room = max(10, width - LABEL - len(text))
    line = label("goodput", "")
    for name, columns in divide_width(known, room).items():
        line.append(glyph(name) * columns, SHARE_COLOURS.get(name, "white"))
    line.append(text)
    legend = label("", "")
    for name, value in sorted(known.items(), key=lambda item: -item[1]):
        if value / total >= 0.01:
            legend.append(glyph(name), SHARE_COLOURS.get(name, "white"))
            # not to be cut in between
            legend.append(f"\u00a0{plain(name)}\u00a0{value / total:.0%}  ")
    data = found.parts.get("training", {}).get("data", 0.0)
    if data / total >= 0.01:
        legend.append(f"({data / total:.0%} waiting for data)")
    return Text("\n").join([line, legend])


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


def attempts(found: Sequence[AttemptDetails], *, is_over: bool) -> Text:
    lines: list[Text] = []
    for each in found:
        reason = each.reason if each.failure is None else each.failure.text
        why = f": {plain(reason)}" if reason else ""
        now = "no verdict" if is_over or each is not found[-1] else "under way"
        text = f"{each.number} {plain(each.verdict) or now}{why}"
        lines.append(label("attempts" if not lines else "", text))
    return Text("\n").join(lines)


def settings(details: RunDetails, width: int) -> Text:
    lines = [label("command", plain(details.command))] if details.command else []
    lines += [
        label("", f"{plain(name)} = {plain(value)}") for name, value in details.config.items()
    ]
    lines.append(label("folder", plain(origin.place(details.overview.path))))
    lines += [
        label(plain(name), plain(command), "cyan") for name, command in details.commands.items()
    ]
    return Text("\n").join(lines)
