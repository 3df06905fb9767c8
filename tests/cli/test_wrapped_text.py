"""Sentences and commands in a terminal: no word is cut, and what people copy stays whole."""

from __future__ import annotations

import io
import sys

import pytest

from paceline.cli import console
from paceline.cli.wrapped_text import wrap_prose

HINT = (
    "  For runs on alps, add `--on alps`. Set the variable PACELINE_SCRATCH, or type: paceline logs -f --on alps 1a2b\n"
    '    [profiles.alps] # an example with a long line, which stays as it is\n    host = "login.example.org"'
)


def test_hints_wrap_between_words_and_commands_stay_whole() -> None:
    assert wrap_prose(HINT, 200) == HINT
    assert wrap_prose(HINT, 40).splitlines() == [
        "  For runs on alps, add `--on alps`. Set",
        "  the variable PACELINE_SCRATCH, or",
        "  type: paceline logs -f --on alps 1a2b",
        *HINT.splitlines()[1:],
    ]
    wrapped = wrap_prose("see `paceline show last` and more", 12)
    assert wrapped.splitlines() == ["see", "  `paceline show last`", "  and more"]
    wrapped = wrap_prose(
        "it runs; watch it: paceline logs -f 1a2b; cancel it: paceline cancel 1a2b", 40
    )
    assert wrapped.splitlines() == [
        "it runs; watch it:",
        "  paceline logs -f 1a2b; cancel it:",
        "  paceline cancel 1a2b",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(Terminal(), 4), (io.StringIO(), 2)])
def test_errors_wrap_in_a_terminal_alone(stream: io.StringIO, lines: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "40")
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "stderr", stream)
        console.say_problem(
            "Something is wrong with one of your files.",
            "Look at it, and correct what is wrong there.",
        )
    printed = stream.getvalue().splitlines()
    assert len(printed) == lines
    assert all(len(line) <= 40 for line in printed) == (lines == 4)
