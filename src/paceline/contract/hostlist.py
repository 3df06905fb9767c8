"""Slurm's host lists, such as `gpu[01-03,7],login1`. Nodes and containers may have no `scontrol`
to expand them.
"""

from __future__ import annotations

import re

from paceline.errors import UsageError

MAX_HOSTS = 65_536  # more than Slurm itself allows; a list may come from a file of somebody else
_WORD = r"(?:[^,\[\]]|\[[^\[\]]+\])+"
_LIST = re.compile(rf"(?:{_WORD})?(?:,(?:{_WORD})?)*")


def expand(text: str, *, limit: int = MAX_HOSTS) -> list[str]:
    """Return every host of a list, in its order: `a[1-2],b` gives a1, a2, b. Several brackets
    multiply.

    Raises UsageError if the list is malformed or has more than `limit` hosts, before it takes
    memory for them.
    """
    shown = repr(text if len(text) <= 100 else f"{text[:100]}...")
    if not _LIST.fullmatch(text):
        raise _malformed(shown)
    hosts: list[str] = []
    for word in filter(str.strip, re.findall(_WORD, text)):
        names = [""]
        for piece in re.findall(r"\[[^\]]+\]|[^\[]+", word.strip()):
            choices = _parse_ranges(piece[1:-1], shown) if piece.startswith("[") else [piece]
            if len(hosts) + len(names) * len(choices) > limit:
                raise _too_long(shown, limit)
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return hosts


def _parse_ranges(ranges: str, shown: str) -> list[str]:
    """`01-03,7` stands for 01, 02, 03, 7: the first number's width is the width of its range."""
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + MAX_HOSTS:
            raise _malformed(shown)
        if len(found) + last - first >= MAX_HOSTS:
            raise _too_long(shown, MAX_HOSTS)
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def _malformed(shown: str) -> UsageError:
    return UsageError(f"Invalid host list {shown}: use names and ranges such as gpu[01-04,7],big1.")


def _too_long(shown: str, limit: int) -> UsageError:
    return UsageError(f"The host list {shown} has more than {limit:,} hosts.")
