"""Text and JSON that is safe to show, since names, messages and numbers may come from anyone."""

from __future__ import annotations

import json
import math
import re
from typing import Any

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
    """Return foreign text as one line without escape sequences, which cannot act on a terminal."""
    line = _ESCAPE.sub("", str(text)[: 4 * MAX_TEXT]).expandtabs(4).replace("\n", " ")[:MAX_TEXT]
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


def finite(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def encode(answer: Any) -> bytes:
    """Return an answer as JSON that every browser can parse."""
    try:
        text = _dump(answer)
    except ValueError:
        text = _dump(finite(answer))
    return text.encode("ascii")


def _dump(answer: Any) -> str:
    return json.dumps(answer, allow_nan=False, separators=(",", ":"), default=str)
