"""Curves of a run's metrics that stay small however long the run is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT = 1000  # buckets of a curve; each has at most two points
MAX_CURVES = 500
NOT_CURVES = frozenset({"step", "epoch", "time"})


@dataclass(frozen=True)
class Curve:
    """The values of one metric. `times` are in seconds since 1970."""

    name: str
    steps: list[int]
    times: list[float]
    values: list[float]


@dataclass
class _Bucket:
    """Neighbouring points, of which only the lowest and the highest are drawn: no spike disappears."""

    first: int
    count: int
    low: tuple[int, float, float]  # step, time, value
    high: tuple[int, float, float]

    def merge(self, other: _Bucket) -> None:
        self.count += other.count
        self.low = min(self.low, other.low, key=lambda point: point[2])
        self.high = max(self.high, other.high, key=lambda point: point[2])


@dataclass
class _Line:
    size: int = 1  # points per bucket
    buckets: list[_Bucket] = field(default_factory=list)

    def add(self, step: int, time: float, value: float) -> None:
        while self.buckets and self.buckets[-1].first >= step:
            self.buckets.pop()  # a restart repeats these steps
        point = (step, time, value)
        new = _Bucket(step, 1, point, point)
        if self.buckets and self.buckets[-1].count < self.size:
            self.buckets[-1].merge(new)
            return
        self.buckets.append(new)
        if len(self.buckets) >= 2 * LIMIT:
            for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=False):
                left.merge(right)
            self.buckets = self.buckets[::2]
            self.size *= 2

    def points(self) -> list[tuple[int, float, float]]:
        return [point for bucket in self.buckets for point in sorted({bucket.low, bucket.high})]


class Curves:
    """The curves of all numbers in the lines of a metrics file."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            step, time = record.get("step"), record.get("time")
            if not isinstance(step, int) or not isinstance(time, (int, float)):
                continue
            for name, value in record.items():
                if name in NOT_CURVES or isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                if math.isfinite(value) and (name in self._lines or len(self._lines) < MAX_CURVES):
                    self._lines.setdefault(name, _Line()).add(step, time, float(value))

    @property
    def names(self) -> list[str]:
        return list(self._lines)

    def curve(self, name: str) -> Curve:
        """Return a curve. Raises KeyError if no line has had this number."""
        points = self._lines[name].points()
        return Curve(
            name, [step for step, _, _ in points], [time for _, time, _ in points], [value for _, _, value in points]
        )

    def all(self) -> list[Curve]:
        return [self.curve(name) for name in self._lines]
