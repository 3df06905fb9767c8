"""How the probe on a node is asked for stacks, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STACKS = "--stacks"
# begins the line with the answer: a site's start-up files may print others
MARK = "paceline-probe "


@dataclass(frozen=True)
class NodeAnswer:
    """What a node says; `problem` if it says nothing."""

    host: str
    answer: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
