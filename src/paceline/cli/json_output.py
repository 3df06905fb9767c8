"""The output of `--json`: one object, with the number of its format."""

from __future__ import annotations

import json
import sys
from typing import Any

FORMAT = 1  # changes when a program that reads it would have to; new keys may come at any time


def print_json(**values: Any) -> None:
    """Print an object. Escapes all but ASCII, so that no terminal acts on what names and messages contain."""
    text = json.dumps({"format": FORMAT, **values}, indent=1, allow_nan=False)
    sys.stdout.write(text + "\n")
