"""Console output: errors in red with a hint, notes in grey, tables by rich."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.ui.terminal import text as safe_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RED, GREEN, GREY, BOLD, PLAIN = "\033[31m", "\033[32m", "\033[90m", "\033[1m", "\033[0m"
NARROWEST = 20  # columns of a terminal for which sentences are wrapped
PIPE_WIDTH = 10_000  # columns of a pipe or a file: nothing is wrapped or cut for other programs
THEME = {"good": "green", "bad": "red", "warn": "yellow", "dim": "grey50", "name": "bold", "path": "cyan"}

# Colours and the erasing of a line, which progress bars need; then all that acts on a terminal otherwise.
_ESCAPE = re.compile(
    r"(\x1b\[[0-9;:]*[mK])|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]"
    r"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
printable = safe_text.printable
_BEGUN_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]{0,4096}\x1b?|[ -/]*)\Z")


def is_colourful(stream: IO[str]) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[str]) -> str:
    return f"{colour}{text}{PLAIN}" if is_colourful(stream) else text


class ScriptOutput:
    """Prints a script's output. A terminal gets its text and colours alone; a pipe or a file gets all of it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._filters = stream.isatty()
        self._begun = ""  # an escape sequence whose end has not come yet

    def write(self, text: str) -> None:
        if self._filters:
            text = self._begun + text
            found = _BEGUN_ESCAPE.search(text)
            self._begun = found[0] if found else ""
            text = _ESCAPE.sub(lambda escape: escape[1] or "", text[: len(text) - len(self._begun)])
        self._stream.write(text)


_is_passing = False  # whether the last line of the terminal is there only for the time being


def say_for_now(text: str) -> None:
    """Print a line to a terminal, until the next one or `wipe` removes it."""
    global _is_passing
    text = printable(f"paceline: {text}")[: max(1, shutil.get_terminal_size().columns - 1)]
    _is_passing = True
    with suppress(OSError):
        print(paint(text, GREY, sys.stderr), file=sys.stderr, end="", flush=True)


def wipe() -> None:
    """Remove the line that was there only for the time being."""
    global _is_passing
    if _is_passing:
        _is_passing = False
        with suppress(OSError):
            print("\n" if os.environ.get("TERM") == "dumb" else "\r\033[K", file=sys.stderr, end="", flush=True)


def say(text: str, *, colour: str = "") -> None:
    """Print a line to stderr, since stdout is the script's; ignore a closed terminal."""
    wipe()
    text = printable(text)
    try:
        print(paint(text, colour, sys.stderr) if colour else text, file=sys.stderr, flush=True)
    except OSError:
        pass


def _fit(text: str) -> str:
    """Wrap sentences for a terminal. In a pipe or a file, lines stay whole."""
    if sys.stderr is None or not sys.stderr.isatty():
        return text
    from paceline.cli.output.wrapped_text import wrap_prose

    try:
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stderr.fileno()).columns)
    except (OSError, ValueError):
        return text
    return wrap_prose(text, width) if width >= NARROWEST else text


def say_note(text: str) -> None:
    say(_fit(f"paceline: {text}"), colour=GREY)


def say_about(cluster: str, text: str) -> None:
    """Print what happens on one of several clusters."""
    say(_fit(f"{cluster}: {text}"), colour=GREY)


def say_error(error: PacelineError) -> None:
    for each in (*error.earlier, error):
        say_problem(each.message, each.hint)


def say_problem(message: str, hint: str = "") -> None:
    say(_fit(f"paceline: error: {message}"), colour=RED)
    if hint:
        say(_fit(f"  {hint}"))


def cell(value: object) -> str:
    """Return text for a table of rich: no control characters, no markup."""
    text = printable(str(value))
    if "[" not in text and "\\" not in text:  # most cells of a long table
        return text
    from rich.markup import escape

    return escape(text)


def print_table(out: Console, table: Table) -> None:
    """Print a table. In a pipe, lines end where their text does."""
    with out.capture() as printed:
        out.print(table)
    lines = printed.get().splitlines(keepends=True)
    text = "".join(lines if out.is_terminal else [f"{line.rstrip()}\n" for line in lines])
    out.file.write(text)


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
