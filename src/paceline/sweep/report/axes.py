"""The position of a value on an axis: linear or logarithmic for numbers, evenly spaced for anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CATEGORIES = 10  # up to this many different values are evenly spaced


@dataclass(frozen=True)
class Scale:
    """Maps values to 0..1, with the marks to draw at the axis."""

    kind: str  # linear | log | categories
    low: float = 0.0
    high: float = 1.0
    categories: tuple[str, ...] = ()
    marks: tuple[tuple[float, str], ...] = ()  # position, text

    def at(self, value: object) -> float:
        if self.kind == "categories":
            return spaced(self.categories.index(to_label(value)), len(self.categories))
        number = as_number(value)
        assert number is not None, f"{value!r} on an axis of numbers"
        if self.kind == "log":
            return _share(math.log(number), math.log(self.low), math.log(self.high))
        return _share(number, self.low, self.high)


def scale_of(values: Sequence[object], *, log: bool | None = None) -> Scale:
    """Return the axis for these values. `log` says whether it is logarithmic, if known."""
    distinct = {to_label(value): value for value in values}
    numbers = [number for value in distinct.values() if (number := as_number(value)) is not None]
    if not numbers or len(numbers) < len(distinct) or len(distinct) <= MAX_CATEGORIES:
        ordered = sorted(distinct, key=lambda text: _order(distinct[text]))
        marks = tuple((spaced(index, len(ordered)), text) for index, text in enumerate(ordered))
        return Scale("categories", categories=tuple(ordered), marks=marks)
    low, high = min(numbers), max(numbers)
    if log if log is not None and low > 0 else wide(low, high):
        return _marked(Scale("log", low, high), decades(low, high))
    return linear(low, high)


def linear(low: float, high: float) -> Scale:
    """Return a linear axis. Values beyond its ends are drawn at the end."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    return _marked(Scale("linear", low, high), round_numbers(low, high))


def wide(low: float, high: float) -> bool:
    """Return whether a range is so wide that a log scale suits it."""
    return low > 0 and high / low >= 500


def spaced(index: int, count: int) -> float:
    return 0.5 if count == 1 else index / (count - 1)


def round_numbers(low: float, high: float, about: int = 5) -> list[float]:
    """Return about this many round numbers within a range."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten within a range, or its ends if there are too few."""
    powers = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    every = max(1, math.ceil(len(powers) / 6))
    return powers[::every] if len(powers) > 1 else [low, high]


def to_label(value: object) -> str:
    """Return a value as a short label, the same for equal numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def as_number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _marked(scale: Scale, values: list[float]) -> Scale:
    marks = tuple((scale.at(value), to_label(float(value))) for value in values)
    return Scale(scale.kind, scale.low, scale.high, scale.categories, marks)


def _order(value: object) -> tuple[int, float, str]:
    number = as_number(value)
    return (0, number, "") if number is not None else (1, 0.0, str(value))


def _share(value: float, low: float, high: float) -> float:
    return 0.5 if high == low else min(max((value - low) / (high - low), 0.0), 1.0)
