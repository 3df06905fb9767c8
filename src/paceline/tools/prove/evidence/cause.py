"""A cause of a failed proof."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause: its name, what shows it, and what to do about it."""

    name: str
    evidence: str
    fix: str
