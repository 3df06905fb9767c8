"""What a look at something found: good, worth a warning, or a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GOOD, WARNING, PROBLEM = "good", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    about: str
    level: str
    text: str
    hint: str = ""


def worst(found: Sequence[Finding]) -> str:
    levels: Mapping[str, int] = {GOOD: 0, WARNING: 1, PROBLEM: 2}
    return max((each.level for each in found), key=lambda level: levels[level], default=GOOD)
