"""The output of `--json`: one object, with the number of its format."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

FORMAT = 1  # changes when a program that reads it would have to; new keys may come at any time


def print_json(**values: Any) -> None:
    """Print an object. NaN and infinities become null.

    All but ASCII is escaped, so that no terminal acts on what names and messages contain.
    """
    table = {"format": FORMAT, **values}
    try:
        text = json.dumps(table, indent=1, allow_nan=False)
    except ValueError:  # numbers of a script's own that JSON does not have
        text = json.dumps(_without_nan(table), indent=1, allow_nan=False)
    sys.stdout.write(text + "\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
