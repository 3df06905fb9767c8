"""The score of a checkpoint: the value that its weights reached in the metric of
`session(best=...)`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint.marker import Marker, read_marker
from paceline.contract.files.foreign_records import make
from paceline.errors import CheckpointError

META_KEY = "best"  # of a marker's `meta`


@dataclass(frozen=True)
class Score:
    """The value of a metric, and whether a lower ("min") or a higher one ("max") is better."""

    metric: str
    mode: str
    value: float

    def to_meta(self) -> dict[str, Any]:
        return {META_KEY: asdict(self)}


def is_better(value: float, other: float, mode: str) -> bool:
    return value < other if mode == "min" else value > other


def read_score(marker: Marker, metric: str | None = None) -> Score | None:
    """Return a checkpoint's score by this metric or by any; None if it has none, or if its value
    is NaN.
    """
    entry = marker.meta.get(META_KEY) if isinstance(marker.meta, dict) else None
    try:
        score = make(Score, entry) if isinstance(entry, dict) else None
    except ValueError:
        return None
    if score is None or math.isnan(score.value):
        return None
    return score if metric in (None, score.metric) else None


def choose_best(markers: Iterable[Marker], metric: str, mode: str) -> tuple[int, Score] | None:
    """Return the step with the best score, and the score; of equal ones the newest, which has
    trained longer.
    """
    best: tuple[int, Score] | None = None
    for marker in sorted(markers, key=lambda each: each.step, reverse=True):
        score = read_score(marker, metric)
        if score is not None and (best is None or is_better(score.value, best[1].value, mode)):
            best = marker.step, score
    return best


def find_best(folders: Iterable[Path]) -> tuple[int, Score] | None:
    """Return the best step of these checkpoints, newest first, by the newest score's metric; None
    without scores.
    """
    markers = []
    for folder in folders:
        with contextlib.suppress(CheckpointError):
            markers.append(read_marker(folder))
    newest = next((score for marker in markers if (score := read_score(marker)) is not None), None)
    return choose_best(markers, newest.metric, newest.mode) if newest is not None else None
