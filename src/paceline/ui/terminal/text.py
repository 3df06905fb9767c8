"""Text that is safe to print, since names, messages and metrics may come from anyone."""

from __future__ import annotations

import re

# Escape sequences with their parameters, which would be left over as text.
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)
MAX_TEXT = 2000  # characters of a line


def printable(text: str) -> str:
    """Replace control characters, which would act on the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\t\n" else "\ufffd" for each in text)


def shorten(text: str, width: int) -> str:
    """Return one line of text in at most so many characters."""
    line = printable(text).partition("\n")[0].replace("\t", " ")
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."


def plain(text: object) -> str:
    """Return foreign text as one line that cannot act on a terminal, also without escape sequences."""
    line = _ESCAPE.sub("", str(text)[: 4 * MAX_TEXT]).expandtabs(4).replace("\n", " ")[:MAX_TEXT]
    return "".join(each if each.isprintable() else "\ufffd" for each in line)
