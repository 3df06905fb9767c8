"""Quote values for shell text. Every value that enters a script goes through here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from paceline.errors import UsageError


def quote(text: str) -> str:
    """Return a word that bash reads back byte for byte, on one line."""
    if "\0" in text:
        raise UsageError(
            f"There is a NUL character in {text!r}.", hint="Remove it: a shell cannot pass it on."
        )
    if text.isprintable():
        return shlex.quote(text)
    # Control characters, newlines and bytes outside UTF-8: bash's own escapes keep them on one
    # line.
    escaped = "".join(_escape(byte) for byte in os.fsencode(text))
    return f"$'{escaped}'"


def _escape(byte: int) -> str:
    character = chr(byte)
    if character in "\\'":
        return "\\" + character
    return character if 0x20 <= byte < 0x7F else f"\\x{byte:02x}"


def command_line(argv: Iterable[str]) -> str:
    """Return a command as you would type it."""
    return " ".join(quote(arg) for arg in argv)
