"""Paceline's own lines on standard error, apart from the script's output."""

from __future__ import annotations

import sys


def note(text: str) -> None:
    """Print one line: `paceline: ...`."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
