"""Answers as JSON that every browser can parse."""

from __future__ import annotations

import json
from typing import Any

from paceline.watch.details import finite


def encode(answer: Any) -> bytes:
    """Return an answer as JSON. Numbers that JSON lacks (NaN, infinity) become null."""
    try:
        text = _dump(answer)
    except ValueError:
        text = _dump(finite(answer))
    return text.encode("ascii")


def _dump(answer: Any) -> str:
    return json.dumps(answer, allow_nan=False, separators=(",", ":"), default=str)
