"""Answers as JSON that every browser can parse."""

from __future__ import annotations

import json
import math
from typing import Any


def encode(answer: Any) -> bytes:
    """Return an answer as JSON. Numbers that JSON lacks (NaN, infinity) become null."""
    try:
        text = _dump(answer)
    except ValueError:
        text = _dump(_finite(answer))
    return text.encode("ascii")


def _dump(answer: Any) -> str:
    return json.dumps(answer, allow_nan=False, separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
