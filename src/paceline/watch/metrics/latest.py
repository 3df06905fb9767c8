"""What a run logged last, and how fast it goes: from the end of its metrics, whatever their length."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import parse_object, read_tail

TAIL = 16384  # bytes
FEW_LINES, FEW_BYTES = 2, 2048  # enough for the newest values of a run that is over
RATES = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}
LOSSES = ("loss", "train_loss", "train/loss")  # the first that a run logs; else any name with "loss" in it
PAUSE = 10.0  # times the usual pace: the run waited in the queue, or started again
MIN_PAUSE = 60.0  # seconds; an evaluation between two steps is no pause


@dataclass(frozen=True)
class Latest:
    """The newest numbers of a run; None or empty if it has not logged them."""

    step: int | None = None
    time: float | None = None
    loss: float | None = None
    loss_name: str = ""
    rate: float | None = None
    rate_unit: str = ""
    seconds_per_step: float | None = None


def read_latest(metrics: Path | str, *, with_pace: bool = True) -> Latest:
    """Read the end of a metrics file. Without the pace, that is a few lines."""
    try:
        end = b"" if with_pace else read_tail(metrics, FEW_BYTES).rstrip()
        records = _parse(end.rsplit(b"\n", FEW_LINES)[-FEW_LINES:])
        if not any(_loss_name(record) for record in records):  # an evaluation may have logged last
            records = _parse(read_tail(metrics, TAIL).rstrip().splitlines())
    except OSError:
        return Latest()
    last: dict[str, Any] = {}
    for record in records:
        last |= record
    loss_name = _loss_name(last)
    rate, unit = _rate(last)
    return Latest(
        step=_last_step(records),
        time=as_number(last.get("time")),
        loss=as_number(last.get(loss_name)),
        loss_name=loss_name,
        rate=rate,
        rate_unit=unit,
        seconds_per_step=(_pace(records) or as_number(last.get("seconds"))) if with_pace else None,
    )


def _parse(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        with suppress(ValueError):
            records.append(parse_object(line))
    return records


def as_number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _last_step(records: Sequence[Mapping[str, Any]]) -> int | None:
    steps = (record.get("step") for record in reversed(records))
    return next((step for step in steps if isinstance(step, int) and not isinstance(step, bool)), None)


def _loss_name(last: Mapping[str, Any]) -> str:
    known = [name for name in LOSSES if name in last]
    known += [name for name in last if "loss" in name.lower()]
    return known[0] if known else ""


def _rate(last: Mapping[str, Any]) -> tuple[float | None, str]:
    for name, unit in RATES.items():
        if (rate := as_number(last.get(name))) is not None:
            return rate, unit
    seconds = as_number(last.get("seconds"))
    return (1 / seconds, "steps/s") if seconds else (None, "")


def _pace(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds per step, with evaluations and saves, but without the time between two job starts."""
    points = [(as_number(record.get("time")), as_number(record.get("step"))) for record in records]
    known = [(time, step) for time, step in points if time is not None and step is not None]
    spans = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in pairwise(known)
        if after[0] > before[0] and after[1] > before[1]
    ]
    if not spans:
        return None
    usual = statistics.median(seconds / steps for seconds, steps in spans)
    counted = [each for each in spans if each[0] < MIN_PAUSE or each[0] / each[1] < PAUSE * usual]
    steps = sum(steps for _, steps in counted)
    return sum(seconds for seconds, _ in counted) / steps if steps else usual
