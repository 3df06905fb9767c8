"""Read `metrics.jsonl` as it grows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.contract.files import open_without_waiting
from paceline.contract.foreign_records import parse_objects
from paceline.contract.run_folder import ALONE

CHUNK = 1 << 20  # bytes
MAX_LINE = 1 << 20  # a longer one is not ours
LARGE = 16 << 20  # bytes; a file that is larger at first is sampled
SAMPLES = 500  # places in a large file
SAMPLE = 16384  # bytes to read at each of them
SAMPLE_LINES = 8  # to parse of those, and all that have more or fewer numbers
TAIL = 1 << 18  # bytes at the end of a large file, which are read whole


class MetricsReader:
    """A metrics file and how far it has been read: each call returns what has been written since
    the last one.

    Of a file that is large at the first call, lines at evenly spaced places are read, and all at
    its end: curves have fewer points than it has lines anyway, and nobody waits for a million of
    them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.is_sampled = False

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that are new. A file that has become shorter is read from its
        beginning.
        """
        try:
            descriptor = open_without_waiting(self.path, follow=True)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.position:
                self.position, self.is_sampled = 0, False
            if self.position == 0 and size > LARGE:
                self.is_sampled = True
                yield from self._read_samples(file, size - TAIL)
            file.seek(self.position)
            rest = b""
            while chunk := file.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                self.position += len(chunk)
                yield from parse_objects(filter(None, lines))
                if len(rest) > MAX_LINE:
                    rest = b""
            self.position -= len(rest)

    def _read_samples(self, file: IO[bytes], end: int) -> Iterator[dict[str, Any]]:
        """Yield lines at evenly spaced places before `end`, and continue at the first line after
        it.
        """
        for number in range(SAMPLES):
            file.seek(number * end // SAMPLES)
            if number:
                file.readline(MAX_LINE)  # the rest of a line
            usual = -1
            for position, line in enumerate(
                (file.read(SAMPLE) + file.readline(MAX_LINE)).split(b"\n")
            ):
                length = line.count(b'":')  # an evaluation logs other numbers than a step does
                if position < SAMPLE_LINES or length != usual:
                    usual = length if position < SAMPLE_LINES else usual
                    yield from parse_objects([line])
        file.seek(end)
        file.readline(MAX_LINE)
        self.position = file.tell()


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
