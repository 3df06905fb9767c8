"""Console output: errors in red with a hint, notes in grey, tables by rich, JSON for programs.

The rooms below the command line log to `logging.getLogger("paceline")`; `TerminalHandler` prints it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.ui.terminal import text as safe_text

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
    sys.stdout.write(json.dumps(_without_nan(table), indent=1, allow_nan=False) + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
