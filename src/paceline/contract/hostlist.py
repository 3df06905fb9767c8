"""Slurm's host lists, such as `gpu[01-03,7],login1`. Nodes and containers may have no `scontrol` to expand them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice, product

from paceline.errors import UsageError

MAX_HOSTS = 65_536  # more than Slurm itself allows; a list may come from a file of somebody else
_PIECE = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]")


def expand(text: str) -> list[str]:
    """Every host of a list, in its order: `a[1-2],b` gives a1, a2, b. Several brackets multiply."""
    hosts = islice((host for word in _split(text) for host in _expand_word(word, text)), MAX_HOSTS + 1)
    if len(found := list(hosts)) > MAX_HOSTS:
        raise _malformed(text)
    return found


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


def _expand_word(word: str, whole: str) -> Iterable[str]:
    if "[" not in word:
        return (word,)
    choices = []
    for piece in _PIECE.findall(word):
        choices.append(_numbers(piece[1:-1], whole) if piece.startswith("[") else [piece])
    return map("".join, product(*choices))


def _numbers(text: str, whole: str) -> list[str]:
    """`01-03,7` gives 01, 02, 03, 7: the first number's width is the width of its range."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        first, last, width = (int(match[1]), int(match[2] or match[1]), len(match[1])) if match else (1, 0, 0)
        if not first <= last < first + MAX_HOSTS:
            raise _malformed(whole)
        found += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return found


def _malformed(text: str) -> UsageError:
    return UsageError(f"Invalid host list {text!r}: use names and ranges such as gpu[01-04,7],big1.")
