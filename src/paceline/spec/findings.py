"""What a check found: good, a warning, a problem, or just a note."""

from __future__ import annotations

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
