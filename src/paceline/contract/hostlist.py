"""Slurm's host lists: `gpu[01-03,7],login1` and back, and who gets which ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from paceline.errors import UsageError

_PIECE = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]")


def expand(text: str) -> list[str]:
    """Every host of a list, in its order: `a[1-2],b` gives a1, a2, b. Several brackets multiply."""
    return [host for word in _split(text) for host in _expand_word(word, text)]


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
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise _malformed(whole)
        first, last, width = int(match[1]), int(match[2] or match[1]), len(match[1])
        found += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return found


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"not a host list: {text!r}", hint="expected names and ranges, such as gpu[01-04,7],big1"
    )


def compress(hosts: Iterable[str]) -> str:
    """The short form of a list of hosts: runs of numbers under one prefix become ranges."""
    names = list(dict.fromkeys(hosts))
    split = {host: re.fullmatch(r"(.*?)([0-9]{1,18})", host) for host in names}
    padded = {(m[1], len(m[2])) for m in split.values() if m and m[2].startswith("0") and len(m[2]) > 1}
    families: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for host, match in split.items():
        if match is None:
            plain.append(host)
            continue
        prefix, digits = match[1], match[2]
        # Padded numbers keep their width; unpadded ones of any length belong together.
        width = len(digits) if (prefix, len(digits)) in padded else 0
        families.setdefault((prefix, width), []).append(int(digits))
    words = [_family(prefix, width, numbers) for (prefix, width), numbers in families.items()]
    return ",".join(plain + words)


def _family(prefix: str, width: int, numbers: list[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    parts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in ranges]
    return f"{prefix}[{','.join(parts)}]"


class Seat(NamedTuple):
    """Where one rank sits."""

    rank: int
    host: str
    node: int
    local_rank: int


def rank_table(hosts: Sequence[str], nproc: int) -> list[Seat]:
    """Ranks are dealt node by node, as every launch style deals them."""
    seats = ((node, host, local) for node, host in enumerate(hosts) for local in range(nproc))
    return [Seat(rank, host, node, local) for rank, (node, host, local) in enumerate(seats)]
