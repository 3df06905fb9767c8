"""Slurm's host lists, such as `gpu[01-03,7],login1`. Nodes and containers may have no `scontrol`
to expand them.
"""

from __future__ import annotations

import re

from paceline.errors import UsageError

MAX_HOSTS = 65_536  # more than Slurm itself allows; a list may come from a file of somebody else
MAX_SHOWN = 100  # characters of a list in a message
_WORD = r"(?:[^,\[\]]|\[[^\[\]]+\])+"
_LIST = re.compile(rf"(?:{_WORD})?(?:,(?:{_WORD})?)*")


def expand(text: str, *, limit: int = MAX_HOSTS) -> list[str]:
    """Return every host of a list, in its order: `a[1-2],b` gives a1, a2, b. Several brackets
    multiply.

    Raises UsageError if the list is malformed or has more than `limit` hosts, before it takes
    memory for them.
    """
    if not _LIST.fullmatch(text):
        raise _malformed(text)
    hosts: list[str] = []
    for word in filter(str.strip, re.findall(_WORD, text)):
        names = [""]
        for piece in re.findall(r"\[[^\]]+\]|[^\[]+", word.strip()):
            choices = _parse_ranges(piece[1:-1], text) if piece.startswith("[") else [piece]
            if len(hosts) + len(names) * len(choices) > limit:
                raise _too_long(text, limit)
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return hosts


def _parse_ranges(ranges: str, whole: str) -> list[str]:
    """`01-03,7` stands for 01, 02, 03, 7: the first number's width is the width of its range."""
    found: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        if match is None:
            raise _malformed(whole)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MAX_HOSTS:
            raise _malformed(whole)
        if len(found) + last - first >= MAX_HOSTS:
            raise _too_long(whole, MAX_HOSTS)
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"Invalid host list {_cut(text)}: use names and ranges such as gpu[01-04,7],big1."
    )


def _too_long(text: str, limit: int) -> UsageError:
    return UsageError(f"The host list {_cut(text)} has more than {limit:,} hosts.")


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
