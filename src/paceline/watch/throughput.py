"""How fast a run trains, from the end of its metrics."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import parse_object, read_tail
from paceline.spec.quantities import show_seconds

TAIL = 65536  # bytes
LINES = 100  # whose median counts
RATES = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
SPEEDS = frozenset((*RATES, "seconds", "data_wait", "mfu", "peak_memory"))
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def describe_throughput(metrics: Path) -> str:
    """Return the rates, the time per step, the share of waiting for data, MFU and memory; empty if
    unknown.

    They are the newest ones, as in all lists of runs: each line is an average over the last few
    steps already.
    """
    newest: dict[str, float] = {}
    for record in _read_end(metrics):
        newest |= {
            name: float(value)
            for name, value in record.items()
            if name in SPEEDS and _is_number(value)
        }
    parts = [
        f"{short_number(newest[name])} {unit}" for name, unit in RATES.items() if name in newest
    ]
    if (seconds := newest.get("seconds")) is not None:
        parts.append(f"{show_step(seconds)} per step")
    if (wait := newest.get("data_wait")) is not None:
        parts.append(f"{wait:.0%} waiting for data")
    if (mfu := newest.get("mfu")) is not None:
        parts.append(f"{mfu:.1%} MFU")
    if (memory := newest.get("peak_memory")) is not None:
        parts.append(f"{memory:.3g} GB at most")
    return " · ".join(parts)


def read_data_wait(metrics: Path, *, since: float, min_seconds: float) -> float | None:
    """Return the share of time for which ranks waited for data; None if less than `min_seconds`
    are known.
    """
    records = [
        each
        for each in _read_end(metrics)
        if _is_number(each.get("time")) and each["time"] >= since
    ]
    if not records or records[-1]["time"] - records[0]["time"] < min_seconds:
        return None
    return _median(records, "data_wait")


def _read_end(metrics: Path) -> list[dict[str, Any]]:
    try:
        lines = read_tail(metrics, TAIL).splitlines()[-LINES:]
    except OSError:
        return []
    return [record for line in lines if (record := _parse(line))]


def show_step(seconds: float) -> str:
    if seconds >= 60:
        return show_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return parse_object(line)
    except ValueError:  # a line that is cut off, or somebody else's
        return {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _median(records: list[dict[str, Any]], name: str) -> float | None:
    numbers = [float(record[name]) for record in records if _is_number(record.get(name))]
    return statistics.median(numbers) if numbers else None


def short_number(number: float) -> str:
    size, unit = next((each for each in UNITS if number >= each[0]), UNITS[-1])
    return f"{number / size:.3g}{unit}"
