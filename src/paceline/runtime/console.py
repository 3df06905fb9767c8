"""Paceline's own lines on standard error, apart from the script's output."""

from __future__ import annotations

import sys

MAX_SHOWN_RANKS = 8


def note(text: str) -> None:
    """Print one line: `paceline: ...`."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def format_ranks(ranks: list[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0, 1 and 5"; long lists are cut short."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks]
    if len(shown) > MAX_SHOWN_RANKS:
        shown = [*shown[: MAX_SHOWN_RANKS - 1], f"{len(shown) - MAX_SHOWN_RANKS + 1} others"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
