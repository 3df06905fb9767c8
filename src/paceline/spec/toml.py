"""TOML: files, and values on the command line."""

from __future__ import annotations

import ast
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from paceline.errors import SpecError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

FILE, PROJECT_FILE = "paceline.toml", "pyproject.toml"
MAX_LITERAL = 1000  # characters of a value in Python's syntax


def read_file(file: Path) -> dict[str, Any]:
    """Read a TOML file as plain values; of a pyproject.toml only `[tool.paceline]`."""
    try:
        # some editors write a mark first
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        reason = problem.strerror or problem
        raise SpecError(
            f"Cannot read {file}: {reason}.", hint="Check the path and its permissions."
        ) from None
    except ValueError as problem:
        raise SpecError(f"{file} is not valid TOML: {problem}.", hint="Fix that line.") from None
    if file.name == PROJECT_FILE:
        values = values.get("tool", {}).get("paceline", {})
    return {key: _plain(value) for key, value in values.items()}


def parse_param(text: str) -> tuple[list[str], Any]:
    """Parse `model.width=64` into (["model", "width"], 64)."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise SpecError(f"Invalid --param {text!r}: use key=value, e.g. lr=0.1 or model.width=64.")
    return path, parse_value(value)


def parse_value(text: str) -> Any:
    """Parse a value in TOML syntax (0.1, true, [1, 2], "text") or Python's (True, None, .1); else
    return the text.
    """
    try:
        # in brackets: a comment or a further line would be no value
        closed = tomllib.loads(f"value = [{text}]")["value"]
        value = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return _python_value(text)
    # A string with newlines may parse as further keys, and JSON has no dates.
    return closed[0] if len(value) == len(closed) == 1 and _plain(closed) == closed else text


def _python_value(text: str) -> Any:
    """Return True, False, None, a number or a list of such as Python spells them; anything else as
    a string.
    """
    try:
        value = ast.literal_eval(text) if len(text) <= MAX_LITERAL and "#" not in text else text
        is_plain = json.loads(json.dumps(value)) == value and not isinstance(value, dict)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if is_plain else text


def _plain(value: Any) -> Any:
    """Return dates and times as strings; everything else in TOML is plain data."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else value
