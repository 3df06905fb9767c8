"""Text that wraps at spaces, for terminals."""

from __future__ import annotations

import re
import textwrap

# A word of a sentence. A command that people copy, between backticks or after a colon, counts as one: it stays whole.
_PART = re.compile(r"`[^`\n]*`[^\s`]*|(?<=: )paceline [^;\n]*;?|\S+")


def wrap_prose(text: str, width: int, *, indent: str = "  ") -> str:
    """Break long lines between words, with the next lines indented. Indented lines are examples, and stay whole."""
    return "\n".join(_wrap_line(line, width, indent) for line in text.split("\n"))


def _wrap_line(line: str, width: int, indent: str) -> str:
    begin = line[: len(line) - len(line.lstrip())]
    if len(line) <= width or len(begin) >= 4:
        return line
    words = _PART.findall(line)
    lines = [begin + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append((begin or indent) + word)
    return "\n".join(lines)


def wrap_text(text: str, width: int) -> str:
    """Break long lines at spaces. A word that is longer than a line stays whole."""
    return "\n".join(
        "\n".join(
            textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False)
        )
        for line in text.splitlines()
    )
