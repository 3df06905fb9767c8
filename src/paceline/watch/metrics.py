"""What a run has logged: its curves as the metrics file grows, and its newest numbers and its pace
from the end of the file, whatever its length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.contract.foreign_records import parse_objects, read_objects
from paceline.contract.run_folder import ALONE
from paceline.spec.quantities import show_seconds
from paceline.watch.log_file import LogFile

TAIL = 32768  # bytes
FEW_LINES, FEW_BYTES = 2, 2048  # enough for the newest values of a run that is over
RATES = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}
# the first that a run logs; else any name with "loss" in it
LOSSES = ("loss", "train_loss", "train/loss")
PAUSE = 10.0  # times the usual pace: the run waited in the queue, or started again
NOT_METRICS = frozenset({"step", "epoch", "time"})
LATEST = 1e11  # seconds since 1970
MIN_PAUSE = 60.0  # seconds; an evaluation between two steps is no pause

Point = tuple[float, float, float | None]  # time, step, seconds per step


@dataclass(frozen=True)
class Latest:
    """The newest numbers of a run; None or empty if it has not logged them."""

    step: int | None = None
    time: float | None = None
    loss: float | None = None
    loss_name: str = ""
    rate: float | None = None
    rate_unit: str = ""
    points: tuple[Point, ...] = ()  # its last lines, for the pace

    def since(self, began: float) -> Latest:
        """Return the same with the lines since then alone, such as those of the newest attempt."""
        return replace(self, points=tuple(point for point in self.points if point[0] >= began))

    @property
    def pace(self) -> float | None:
        """The seconds per step, with evaluations and saves, but without the time between two job
        starts.
        """
        spans = self._spans()
        if not spans:
            return (self.points[-1][2] if self.points else None) or None
        usual = statistics.median(seconds / steps for seconds, steps in spans)
        counted = [
            each for each in spans if each[0] < MIN_PAUSE or each[0] / each[1] < PAUSE * usual
        ]
        steps = sum(steps for _, steps in counted)
        return sum(seconds for seconds, _ in counted) / steps if steps else usual

    @property
    def interval(self) -> float:
        """The usual seconds between two lines; 0 if they are not known."""
        spans = self._spans()
        return statistics.median(seconds for seconds, _ in spans) if spans else 0.0

    def _spans(self) -> list[tuple[float, float]]:
        """Return the seconds and steps from line to line, without those that are repeated after a
        restart.
        """
        return [
            (after[0] - before[0], after[1] - before[1])
            for before, after in pairwise(self.points)
            if after[0] > before[0] and after[1] > before[1]
        ]


def read_latest(metrics: Path | str, *, with_pace: bool = True) -> Latest:
    """Read the end of a metrics file. Without the pace, that is a few lines."""
    records = [] if with_pace else read_end(metrics, FEW_BYTES)[-FEW_LINES:]
    if not any(map(_loss_name, records)) or not any(_rate(each)[1] for each in records):
        records = read_end(metrics)  # an evaluation may have logged last, or rank 0 alone
    last = _merge(records)
    loss_name, (rate, unit) = _loss_name(last), _rate(last)
    points = [point for record in records if (point := _point(record))]
    steps = [step for record in records if (step := as_number(record.get("step"))) is not None]
    return Latest(
        step=int(steps[-1]) if steps else None,
        time=as_number(last.get("time")),
        loss=as_number(last.get(loss_name)),
        loss_name=loss_name,
        rate=rate,
        rate_unit=unit,
        points=tuple(points) if with_pace else (),
    )


def read_end(metrics: Path | str, size: int = TAIL) -> list[dict[str, Any]]:
    """Return the last lines of a metrics file; none if there is no such file.

    After a failure, rank 0 has written its own numbers of the last steps: these are not the run's.
    """
    return [
        {name: record.get(name) for name in ("step", "time")} if ALONE in record else record
        for record in read_objects(metrics, limit=size)
    ]


def _merge(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for record in records:
        last |= record
    return last


def as_number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _loss_name(last: Mapping[str, Any]) -> str:
    known = [name for name in LOSSES if name in last]
    known += [name for name in last if "loss" in name.lower()]
    return known[0] if known else ""


def _rate(last: Mapping[str, Any]) -> tuple[float | None, str]:
    for name, unit in RATES.items():
        if (rate := as_number(last.get(name))) is not None:
            return rate, unit
    seconds = as_number(last.get("seconds"))
    rate = as_number(1 / seconds) if seconds else None
    return (rate, "steps/s") if rate is not None else (None, "")


def _point(record: Mapping[str, Any]) -> Point | None:
    """Return when a line came, and its step; None without a time or a whole step: anybody may have
    written it.
    """
    time, step = as_number(record.get("time")), as_number(record.get("step"))
    if time is None or step is None or not step.is_integer() or not 0 <= time < LATEST:
        return None
    seconds = as_number(record.get("seconds"))
    return time, step, seconds if seconds and seconds > 0 else None


def describe_throughput(metrics: Path) -> str:
    """Return the rates, the time per step, the share of waiting for data, MFU and memory; empty if
    unknown.

    They are the newest ones, as in all lists of runs: each line is an average over the last few
    steps already.
    """
    newest = {name: as_number(value) for name, value in _merge(read_end(metrics)).items()}
    words: dict[str, Callable[[float], str]] = {
        "samples_per_second": lambda rate: f"{short_number(rate)} samples/s",
        "tokens_per_second": lambda rate: f"{short_number(rate)} tokens/s",
        "seconds": lambda seconds: f"{show_step(seconds)} per step",
        "data_wait": lambda share: f"{share:.0%} waiting for data",
        "mfu": lambda share: f"{share:.1%} MFU",
        "peak_memory": lambda memory: f"{memory:.3g} GB at most",
    }
    known = ((show, newest.get(name)) for name, show in words.items())
    return " · ".join(show(value) for show, value in known if value is not None)


def read_data_wait(metrics: Path, *, since: float, min_seconds: float) -> float | None:
    """Return the share of time for which ranks waited for data; None if less than `min_seconds`
    are known.
    """
    records = [each for each in read_end(metrics) if (as_number(each.get("time")) or -1.0) >= since]
    if not records or records[-1]["time"] - records[0]["time"] < min_seconds:
        return None
    waits = [wait for each in records if (wait := as_number(each.get("data_wait"))) is not None]
    return statistics.median(waits) if waits else None


def show_step(seconds: float) -> str:
    if seconds >= 60:
        return show_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def short_number(value: float) -> str:
    """Return a number in a few characters: 0.01234, 12.35, 512k."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


# -- curves ----------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Curve:
    """The values of one metric. `times` are in seconds since 1970."""

    name: str
    steps: list[int]
    times: list[float]
    values: list[float]


CurvePoint = tuple[int, float, float]  # step, time, value


def thin(points: Sequence[CurvePoint], limit: int = LIMIT) -> list[CurvePoint]:
    """Keep the lowest and the highest point of each range of steps, so that no spike disappears,
    and the last one: it is the newest value.
    """
    first, last = points[0], points[-1]
    kept: list[CurvePoint] = []
    for _, group in groupby(
        points, lambda each: limit * (each[0] - first[0]) // (last[0] - first[0] + 1)
    ):
        near = sorted(group, key=itemgetter(2))
        kept += sorted({near[0], near[-1]})
    return kept if kept[-1] == last else [*kept, last]


class Curves:
    """The curves of all numbers in the lines of a metrics file."""

    def __init__(self) -> None:
        self._points: dict[str, list[CurvePoint]] = {}
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
                    name in NOT_METRICS
                    or isinstance(value, bool)
                    or not isinstance(value, (int, float))
                ):
                    continue
                if math.isfinite(value) and (
                    name in self._points or len(self._points) < MAX_CURVES
                ):
                    self._add(name, (step, time, float(value)))
        return went_back

    def _add(self, name: str, point: CurvePoint) -> None:
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


def _forget(points: list[CurvePoint], step: int) -> None:
    """Forget the points from a step on: a restart repeats them."""
    while points and points[-1][0] >= step:
        points.pop()
