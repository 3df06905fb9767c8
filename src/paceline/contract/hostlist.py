"""Slurm's host lists, such as `gpu[01-03,7],login1`. Nodes and containers may have no `scontrol`
to expand them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import product

from paceline.errors import UsageError

MAX_HOSTS = 65_536  # more than Slurm itself allows; a list may come from a file of somebody else
MAX_SHOWN = 100  # characters of a list in a message
_PIECE = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]")


@dataclass(frozen=True)
class _Piece:
    """A piece of a word: text as it is or, from a bracket, numbers of at least this width."""

    text: str = ""
    numbers: range | None = None
    width: int = 0

    def __len__(self) -> int:
        return 1 if self.numbers is None else len(self.numbers)

    def texts(self) -> list[str]:
        return (
            [self.text]
            if self.numbers is None
            else [f"{number:0{self.width}d}" for number in self.numbers]
        )


def expand(text: str, *, limit: int = MAX_HOSTS) -> list[str]:
    """Return every host of a list, in its order: `a[1-2],b` gives a1, a2, b. Several brackets
    multiply.

    Raises UsageError if the list is malformed or has more than `limit` hosts, before it takes
    memory for them.
    """
    words = [_parse_word(word, text) for word in _split(text)]
    if sum(math.prod(sum(map(len, choice)) for choice in word) for word in words) > limit:
        raise UsageError(f"The host list {_cut(text)} has more than {limit:,} hosts.")
    return ["".join(parts) for word in words for parts in product(*map(_texts, word))]


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    words, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        if letter in "[]":
            depth += 1 if letter == "[" else -1
            if depth not in (0, 1):
                raise _malformed(text)
        elif letter == "," and depth == 0:
            words.append(text[start:position])
            start = position + 1
    if depth:
        raise _malformed(text)
    words.append(text[start:])
    return [word.strip() for word in words if word.strip()]


def _parse_word(word: str, whole: str) -> list[list[_Piece]]:
    """Return the choices for each piece of a word, not yet as text: a bracket is a choice of
    ranges.
    """
    return [
        _parse_ranges(piece[1:-1], whole) if piece.startswith("[") else [_Piece(piece)]
        for piece in _PIECE.findall(word)
    ]


def _parse_ranges(text: str, whole: str) -> list[_Piece]:
    """`01-03,7` stands for 01, 02, 03, 7: the first number's width is the width of its range."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        first, last, width = (
            (int(match[1]), int(match[2] or match[1]), len(match[1])) if match else (1, 0, 0)
        )
        if not first <= last < first + MAX_HOSTS:
            raise _malformed(whole)
        found.append(_Piece(numbers=range(first, last + 1), width=width))
    return found


def _texts(choice: list[_Piece]) -> list[str]:
    return [text for piece in choice for text in piece.texts()]


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"Invalid host list {_cut(text)}: use names and ranges such as gpu[01-04,7],big1."
    )


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
