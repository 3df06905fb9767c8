"""Text that is safe to print: names, messages and metrics may come from anyone."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace control characters, which would act on the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\t\n" else "\ufffd" for each in text)


def shorten(text: str, width: int) -> str:
    """Return one line of text in at most so many characters."""
    line = printable(text).partition("\n")[0].replace("\t", " ")
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."
