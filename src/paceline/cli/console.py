"""Console output: errors in red with a hint, notes in grey, tables by rich."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console

RED, GREEN, GREY, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[90m", "\033[1m", "\033[0m"
PIPE_WIDTH = 10_000  # columns of a pipe or a file: nothing is wrapped or cut for other programs
THEME = {"good": "green", "bad": "red", "dim": "grey50", "name": "bold", "path": "cyan"}


def is_colourful(stream: IO[str]) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[str]) -> str:
    return f"{colour}{text}{PLAIN}" if is_colourful(stream) else text


def printable(text: str) -> str:
    """Replace control characters, which would act on the terminal: names and messages may be anybody's."""
    return "".join(each if each.isprintable() or each in "\t\n" else "\ufffd" for each in text)


def say(text: str, *, colour: str = "") -> None:
    """Print a line to stderr, since stdout is the script's; ignore a closed terminal."""
    text = printable(text)
    try:
        print(paint(text, colour, sys.stderr) if colour else text, file=sys.stderr, flush=True)
    except OSError:
        pass


def say_note(text: str) -> None:
    say(f"paceline: {text}", colour=GREY)


def say_error(error: PacelineError) -> None:
    for each in (*error.earlier, error):
        say_problem(each.message, each.hint)


def say_problem(message: str, hint: str = "") -> None:
    say(f"paceline: error: {message}", colour=RED)
    if hint:
        say(f"  {hint}")


def cell(value: object) -> str:
    """Return text for a table of rich: no control characters, no markup."""
    from rich.markup import escape

    return escape(printable(str(value)))


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
