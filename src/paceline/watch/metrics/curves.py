"""Curves of a run's metrics that stay small however long the run is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.contract.run_folder import ALONE

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


Point = tuple[int, float, float]  # step, time, value


@dataclass
class _Bucket:
    """Neighbouring points, of which only the lowest and the highest are drawn: no spike disappears.

    The last point of a curve is drawn as well: it is the newest value.
    """

    first: Point
    count: int
    low: Point
    high: Point
    last: Point

    def merge(self, other: _Bucket) -> None:
        self.count += other.count
        self.low = min(self.low, other.low, key=lambda point: point[2])
        self.high = max(self.high, other.high, key=lambda point: point[2])
        self.last = other.last

    def forget(self, step: int) -> None:
        """Forget the points from a step on, which comes after the first one. What they have hidden
        is not known.
        """
        if max(self.low[0], self.high[0], self.last[0]) >= step:
            left = [point for point in (self.first, self.low, self.high) if point[0] < step]
            self.low, self.high = (
                min(left, key=lambda point: point[2]),
                max(left, key=lambda point: point[2]),
            )
            self.last = max(left)
            self.count = 1


@dataclass
class _Line:
    size: int = 1  # points per bucket
    buckets: list[_Bucket] = field(default_factory=list)

    def add(self, step: int, time: float, value: float) -> None:
        self.forget(step)
        point = (step, time, value)
        new = _Bucket(point, 1, point, point, point)
        if self.buckets and self.buckets[-1].count < self.size:
            self.buckets[-1].merge(new)
            return
        self.buckets.append(new)
        if len(self.buckets) >= 2 * LIMIT:
            for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=False):
                left.merge(right)
            self.buckets = self.buckets[::2]
            self.size *= 2

    def forget(self, step: int) -> None:
        """Forget the points from a step on: a restart repeats them."""
        while self.buckets and self.buckets[-1].first[0] >= step:
            self.buckets.pop()
        if self.buckets:
            self.buckets[-1].forget(step)

    def points(self) -> list[Point]:
        found = [point for bucket in self.buckets for point in sorted({bucket.low, bucket.high})]
        last = self.buckets[-1].last if self.buckets else None
        return found if last is None or found[-1] == last else [*found, last]


class Curves:
    """The curves of all numbers in the lines of a metrics file."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._step: int | None = None  # of the last record

    def add(self, records: Iterable[Mapping[str, Any]]) -> bool:
        """Add the numbers of records. Returns whether their steps went back: curves are without
        later ones then.
        """
        went_back = False
        for record in records:
            step, time = record.get("step"), record.get("time")
            if not isinstance(step, int) or not isinstance(time, (int, float)):
                continue
            if self._step is not None and step < self._step:
                went_back = True
                for line in self._lines.values():
                    line.forget(step)
            self._step = step
            if ALONE in record:
                continue
            for name, value in record.items():
                if (
                    name in NOT_CURVES
                    or isinstance(value, bool)
                    or not isinstance(value, (int, float))
                ):
                    continue
                if math.isfinite(value) and (name in self._lines or len(self._lines) < MAX_CURVES):
                    self._lines.setdefault(name, _Line()).add(step, time, float(value))
        return went_back

    @property
    def names(self) -> list[str]:
        return [name for name, line in self._lines.items() if line.buckets]

    def curve(self, name: str) -> Curve:
        """Return a curve. Raises KeyError if no line has had this number."""
        points = self._lines[name].points()
        return Curve(
            name,
            [step for step, _, _ in points],
            [time for _, time, _ in points],
            [value for _, _, value in points],
        )

    def all(self) -> list[Curve]:
        return [self.curve(name) for name in self.names]
