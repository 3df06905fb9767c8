"""Numbers, times and foreign text as `paceline top` writes them."""

from __future__ import annotations

import math
import re

from paceline.spec.quantities import show_seconds

LEVELS = "▁▂▃▄▅▆▇█"
# Escape sequences with their parameters, which would be left over as text.
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)
MAX_TEXT = 2000  # characters of a line


def plain(text: object) -> str:
    """Return foreign text as one line that cannot act on a terminal: no escape sequences, no control characters."""
    line = _ESCAPE.sub("", str(text)[: 4 * MAX_TEXT]).expandtabs(4).replace("\n", " ")[:MAX_TEXT]
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


def duration(seconds: float | None) -> str:
    return "" if seconds is None or not math.isfinite(seconds) else show_seconds(max(0.0, seconds))


def level(share: float) -> str:
    """Return a vertical bar of one character."""
    return (
        LEVELS[min(len(LEVELS) - 1, max(0, int(share * (len(LEVELS) - 0.8))))]
        if math.isfinite(share)
        else " "
    )


def gigabytes(size: float) -> str:
    return f"{size / 2**30:.0f}" if size >= 10 * 2**30 else f"{size / 2**30:.1f}"
