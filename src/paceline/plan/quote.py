"""The one function by which values enter shell text."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from paceline.errors import UsageError


def quote(text: str) -> str:
    """A word that bash reads back byte for byte, on one line."""
    if "\0" in text:
        raise UsageError(f"found a NUL character in {text!r}", hint="no shell can pass one on: leave it out")
    if text.isprintable():
        return shlex.quote(text)
    # Control characters, newlines and bytes that are no UTF-8: bash's own escapes keep the line whole.
    escaped = "".join(_escape(byte) for byte in os.fsencode(text))
    return f"$'{escaped}'"


def _escape(byte: int) -> str:
    character = chr(byte)
    if character in "\\'":
        return "\\" + character
    return character if 0x20 <= byte < 0x7F else f"\\x{byte:02x}"


def command_line(words: Iterable[str]) -> str:
    """Words as one would type them."""
    return " ".join(quote(word) for word in words)
