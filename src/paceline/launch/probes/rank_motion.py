"""What the nodes of a live run have seen of their ranks just now: who moves, and whose stacks
there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.probes.live_probe import NodeAnswer


@dataclass(frozen=True)
class Motion:
    """Ranks, as `agent.probe.motion` describes them."""

    present: frozenset[int]  # those whose nodes have answered
    dumped: frozenset[int]  # have written their stacks
    changed: frozenset[int]  # their stacks differ from those a few seconds before
    busy: frozenset[int]  # use CPU time, files or connections
    awake: frozenset[int]  # do not only wait
    foreign: frozenset[int]  # take SIGUSR2 for themselves, so they have no stacks

    def works(self, rank: int) -> bool:
        return rank in self.changed or rank in self.busy

    def passes(self, rank: int) -> bool:
        """Whether a rank that waits for others gets on every now and then."""
        return rank in self.changed or rank in self.awake


def read_motion(answers: Sequence[NodeAnswer]) -> Motion:
    def ranks(key: str) -> frozenset[int]:
        lists: list[Any] = [each.answer.get(key) for each in answers]
        return frozenset(
            rank
            for each in lists
            if isinstance(each, list)
            for rank in each
            if isinstance(rank, int)
        )

    rows = [
        row
        for each in answers
        if isinstance(each.answer.get("ranks"), list)
        for row in each.answer["ranks"]
    ]
    present = frozenset(
        row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], int)
    )
    return Motion(
        present, *(ranks(key) for key in ("dumped", "changed", "busy", "awake", "foreign"))
    )
