"""Read `metrics.jsonl` as it grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import parse_objects
from paceline.contract.run_folder import ALONE
from paceline.watch.log_file import LogFile


class MetricsReader:
    """A metrics file and how far it has been read."""

    def __init__(self, path: Path) -> None:
        self._file = LogFile(path, keeps_states=True)

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that are new since the last call. A file that has become
        shorter is read from its beginning.
        """
        size = self._file.size()
        if size < self._file.offset:
            self._file = LogFile(self._file.path, keeps_states=True)
        yield from parse_objects(line for _, line in self._file.lines(size))


LIMIT = 1000  # ranges of steps in a long curve, of which the lowest and the highest point are kept
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


def thin(points: Sequence[Point], limit: int = LIMIT) -> list[Point]:
    """Keep the lowest and the highest point of each range of steps, so that no spike disappears,
    and the last one: it is the newest value.
    """
    first, last = points[0], points[-1]
    kept: list[Point] = []
    for _, group in groupby(
        points, lambda each: limit * (each[0] - first[0]) // (last[0] - first[0] + 1)
    ):
        near = sorted(group, key=itemgetter(2))
        kept += sorted({near[0], near[-1]})
    return kept if kept[-1] == last else [*kept, last]


class Curves:
    """The curves of all numbers in the lines of a metrics file."""

    def __init__(self) -> None:
        self._points: dict[str, list[Point]] = {}
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
                for points in self._points.values():
                    _forget(points, step)
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
                if math.isfinite(value) and (
                    name in self._points or len(self._points) < MAX_CURVES
                ):
                    self._add(name, (step, time, float(value)))
        return went_back

    def _add(self, name: str, point: Point) -> None:
        points = self._points.setdefault(name, [])
        _forget(points, point[0])
        points.append(point)
        if len(points) >= 4 * LIMIT:
            points[:] = thin(points)

    @property
    def names(self) -> list[str]:
        return [name for name, points in self._points.items() if points]

    def curve(self, name: str) -> Curve:
        """Return a curve. Raises KeyError if no line has had this number."""
        points = self._points[name]
        return Curve(
            name,
            [step for step, _, _ in points],
            [time for _, time, _ in points],
            [value for _, _, value in points],
        )

    def all(self) -> list[Curve]:
        return [self.curve(name) for name in self.names]


def _forget(points: list[Point], step: int) -> None:
    """Forget the points from a step on: a restart repeats them."""
    while points and points[-1][0] >= step:
        points.pop()
