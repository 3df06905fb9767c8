"""What a part measures: the same thing with Paceline and with its peers, several times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    name: str
    unit: str  # such as "images/s", or "s" for times, of which less is better
    ours: list[float]  # one for each repeat
    peers: dict[str, list[float]]
    targets: dict[str, float] = field(default_factory=dict)  # the least ratio, by peer
    facts: dict[str, float] = field(default_factory=dict)  # other numbers, such as accuracies

    @property
    def less_is_better(self) -> bool:
        return self.unit in ("s", "ms")

    def ratio(self, peer: str) -> float:
        """Return how many times better the median is than that of a peer."""
        ours, theirs = statistics.median(self.ours), statistics.median(self.peers[peer])
        return theirs / ours if self.less_is_better else ours / theirs

    def spread(self, peer: str) -> tuple[float, float]:
        """Return the worst and the best ratio that the repeats allow."""
        theirs, low, high = self.peers[peer], min(self.ours), max(self.ours)
        if self.less_is_better:
            return min(theirs) / high, max(theirs) / low
        return low / max(theirs), high / min(theirs)

    def to_json(self) -> dict[str, Any]:
        ratios = {
            peer: {"ratio": self.ratio(peer), "spread": self.spread(peer)} for peer in self.peers
        }
        return {
            "name": self.name,
            "unit": self.unit,
            "paceline": self.ours,
            "peers": self.peers,
            "ratios": ratios,
            "targets": self.targets,
            "facts": self.facts,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Result:
        return cls(
            values["name"],
            values["unit"],
            values["paceline"],
            values["peers"],
            values["targets"],
            values["facts"],
        )
