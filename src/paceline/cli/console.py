"""Console output: errors in red with a hint, notes in grey, JSON for programs, tables that fit.

The rooms below the command line log to `logging.getLogger("paceline")`; `TerminalHandler` prints it.
In tables, columns that matter least drop out, long texts wrap, and in a pipe nothing is cut.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.ui import text as safe_text

if TYPE_CHECKING:
    from rich.console import Console


RED, GREEN, GREY, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[90m", "\033[1m", "\033[0m"
# Of --json. It changes when a program that reads it would have to; new keys may come at any time.
FORMAT = 1
SOME = 8  # of a list in a message
PIPE_WIDTH = 10_000  # columns of a pipe or a file: nothing is wrapped or cut for other programs
THEME = {
    "good": "green",
    "bad": "red",
    "warn": "yellow",
    "dim": "grey50",
    "name": "bold",
    "path": "cyan",
}

printable = safe_text.printable


def paint(text: str, colour: str, stream: IO[str]) -> str:
    """Return text in a colour, if the stream is a terminal that shows it."""
    is_plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if is_plain else f"{colour}{text}{PLAIN}"


def say(text: str, *, colour: str = "") -> None:
    """Print a line to stderr, since stdout is the script's; ignore a closed terminal."""
    text = printable(text)
    with suppress(OSError):
        print(paint(text, colour, sys.stderr) if colour else text, file=sys.stderr, flush=True)


def say_note(text: str) -> None:
    say(f"paceline: {text}", colour=GREY)


class TerminalHandler(logging.Handler):
    """Prints what the launch half logs, as notes and errors on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            say_problem(record.getMessage())
        else:
            say_note(record.getMessage())


def show_logged() -> None:
    """Print what is logged from now on."""
    log = logging.getLogger("paceline")
    if not log.handlers:
        log.addHandler(TerminalHandler())
        log.setLevel(logging.INFO)


def name_some(texts: Sequence[str]) -> str:
    """Return a few texts, and how many more there are."""
    more = f" and {len(texts) - SOME} more" if len(texts) > SOME else ""
    return ", ".join(texts[:SOME]) + more


def say_error(error: PacelineError) -> None:
    for each in (*error.earlier, error):
        say_problem(each.message, each.hint)


def say_problem(message: str, hint: str = "") -> None:
    say(f"paceline: error: {message}", colour=RED)
    if hint:
        say(f"  {hint}")


def cell(value: object) -> str:
    """Return text for a table of rich: no control characters, no markup."""
    text = printable(str(value))
    from rich.markup import escape

    return escape(text)


def console(*, stderr: bool = False) -> Console:
    """Return a rich console with our theme, as wide as the terminal, or without limit in a pipe.

    rich is imported late, since most commands do not need it.
    """
    from rich.console import Console
    from rich.theme import Theme

    made = Console(theme=Theme(THEME), stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = PIPE_WIDTH
    return made


def print_json(**values: Any) -> None:
    """Print an object. NaN and infinities become null.

    All but ASCII is escaped, so that no terminal acts on what names and messages contain.
    """
    table = {"format": FORMAT, **values}
    sys.stdout.write(json.dumps(safe_text.finite(table), indent=1, allow_nan=False) + "\n")


# -- tables ----------------------------------------------------------------------------------------


GAP = 2  # spaces between columns
KEPT = 0  # the rank of columns that never drop out


@dataclass
class Column:
    """A column: its cells in rich markup, and how much it matters."""

    title: str
    rank: int = KEPT  # the largest drops out first
    wraps_at: int | None = (
        None  # the width below which its texts do not wrap; None if they never do
    )
    justify: Any = "left"
    cells: list[str] = field(default_factory=list)

    @property
    def narrowest(self) -> int:
        from rich.text import Text

        widest = max(Text.from_markup(cell).cell_len for cell in {self.title, *self.cells})
        return widest if self.wraps_at is None else min(widest, self.wraps_at)


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """Return the columns that fit, and those that drop out. Empty columns take no room."""
    filled = [column for column in columns if column.rank == KEPT or any(column.cells)]
    shown, sizes = list(filled), {column.title: column.narrowest + GAP for column in filled}
    while sum(sizes[column.title] for column in shown) - GAP > width:
        last = max(shown, key=lambda column: column.rank)
        if last.rank == KEPT:
            break
        shown.remove(last)
    return shown, [column for column in filled if column not in shown]


def print_columns(out: Console, shown: Sequence[Column]) -> None:
    """Print columns that `fit`. In a pipe, lines end where their text does."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for column in shown:
        table.add_column(
            column.title,
            no_wrap=column.wraps_at is None,
            min_width=column.narrowest,
            justify=column.justify,
            overflow="fold",
        )
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*cells)
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as printed:
        out.print(table)
    out.file.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())
