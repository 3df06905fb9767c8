"""What a check found: good, a warning, a problem, or just a note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GOOD, NOTE, WARNING, PROBLEM = "good", "note", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check. Problems and warnings have a sentence as text; good ones a short
    fact.

    `evidence` says how we know, `hint` what to do, and `docs` where to read more.
    """

    about: str
    level: str
    text: str
    hint: str = ""
    evidence: tuple[str, ...] = ()
    docs: str = ""


def worst(findings: Sequence[Finding]) -> str:
    """Return the most serious level."""
    levels: Mapping[str, int] = {GOOD: 0, NOTE: 0, WARNING: 1, PROBLEM: 2}
    return max(
        (finding.level for finding in findings), key=lambda level: levels[level], default=GOOD
    )
