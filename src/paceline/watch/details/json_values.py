"""Values that every reader of JSON understands."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
