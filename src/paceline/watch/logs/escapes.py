"""Remove what acts on a terminal from the text of a log."""

from __future__ import annotations

import re

# Colours, and all that acts on a terminal otherwise.
_ESCAPE = re.compile(
    r"(\x1b\[[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ "
    r"-/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def strip_escapes(text: str) -> str:
    """Return a line's text alone: no escape sequences and no control characters but tabs."""
    return _ESCAPE.sub("", text)


def keep_colours(text: str) -> str:
    """Return a line's text and colours."""
    return _ESCAPE.sub(lambda found: found[1] or "", text)
