"""Numbers and other values of parameters: which belong on a log scale, and how they are shown."""

from __future__ import annotations

import math

MAX_CATEGORIES = 10  # up to this many different values count as a choice


def wide(low: float, high: float) -> bool:
    """Return whether a range is so wide that a log scale suits it."""
    return low > 0 and high / low >= 500


def round_numbers(low: float, high: float, about: int = 5) -> list[float]:
    """Return about this many round numbers within a range."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


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
