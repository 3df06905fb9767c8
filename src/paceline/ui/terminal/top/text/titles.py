"""The lines above the list and above the log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.text import Text

from paceline.contract.quote import quote
from paceline.ui.terminal.top.data.rows import summary
from paceline.ui.terminal.top.text.words import plain
from paceline.watch import origin
from paceline.watch.overview import Overview


def list_title(runs: Iterable[Overview], wanted: str, scratch: Path) -> Text:
    filtered = (f"  filter: {plain(wanted)}" if wanted else "", "yellow")
    status, view = origin.status(), origin.shown()
    if status and view is not None:
        # One line has to say what to do, also in a narrow terminal.
        status = f"{status.partition(';')[0]}: paceline login {quote(view.cluster)}"
    problem = (f"  {plain(status)}" if status else "", "bold red")
    # The cluster comes first, since a narrow terminal cuts off the end. A problem names it as well.
    where = f" --on {plain(quote(view.cluster))}" if view is not None and not status else ""
    place = (f"  {plain(origin.place(scratch))}", "dim")
    return Text.assemble(
        (f"paceline top{where}", "bold"), f"  {summary(runs)}", filtered, problem, place
    )


def log_title(count: int, searched: str) -> Text:
    text = Text.assemble(
        ("log", "bold"), (f"  {count:,} line{'s' * (count != 1)}" if count else "", "dim")
    )
    if searched:
        text.append(f" with {plain(searched)!r}", "yellow").append("  escape: all lines", "dim")
    return text
