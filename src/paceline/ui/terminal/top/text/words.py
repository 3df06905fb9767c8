"""Numbers, times and foreign text as `paceline top` writes them."""

from __future__ import annotations

import math
import re

from paceline.spec.quantities import show_seconds

FULL, EMPTY = "█", "░"
LEVELS = "▁▂▃▄▅▆▇█"
# Escape sequences with their parameters, which would be left over as text.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")
MAX_TEXT = 2000  # characters of a line


def plain(text: object) -> str:
    """Return foreign text as one line that cannot act on a terminal: no escape sequences, no control characters."""
    line = _ESCAPE.sub("", str(text)[: 4 * MAX_TEXT]).expandtabs(4).replace("\n", " ")[:MAX_TEXT]
    return "".join(each if each.isprintable() else "\ufffd" for each in line)


def short_number(value: float) -> str:
    """Return a number in few characters: 3.14k, 0.0123."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.3g}{unit}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    return "" if seconds is None or not math.isfinite(seconds) else show_seconds(max(0.0, seconds))


def bar(share: float, width: int) -> str:
    """Return a horizontal bar, full at 1."""
    filled = round(min(1.0, max(0.0, share)) * width) if math.isfinite(share) else 0
    return FULL * filled + EMPTY * (width - filled)


def level(share: float) -> str:
    """Return a vertical bar of one character."""
    return LEVELS[min(len(LEVELS) - 1, max(0, int(share * (len(LEVELS) - 0.8))))] if math.isfinite(share) else " "


def gigabytes(size: float) -> str:
    return f"{size / 2**30:.0f}" if size >= 10 * 2**30 else f"{size / 2**30:.1f}"
