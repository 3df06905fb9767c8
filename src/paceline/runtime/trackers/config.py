"""The script's own settings, as `run.config` takes them: a namespace, a data class or a mapping,
as plain values.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import types
from collections.abc import Mapping
from typing import Any

from paceline.contract.redaction import redact_values
from paceline.errors import UsageError

MAX_TEXT = 1000  # characters of a value that is no plain value
MAX_DEPTH = 10  # of what values consist of: some contain themselves


def plain_config(given: Any) -> dict[str, Any]:
    """Return settings as JSON can hold them. Secrets are hidden, by their names.

    What cannot be read is replaced by a note in angle brackets: settings must not end a run.
    """
    parts = _parts(given)
    if parts is None:
        raise UsageError(
            f"run.config got a {type(given).__name__}.",
            hint="Pass the namespace of argparse, a data class or a dictionary: run.config(args).",
        )
    # JSON itself has no NaN and no infinity
    return redact_values(json.loads(json.dumps(_plain_parts(parts, 0)), parse_constant=str))


def _parts(given: Any) -> Mapping[Any, Any] | None:
    """Return the items of a value that has named parts."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, (argparse.Namespace, types.SimpleNamespace)):
        return vars(given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name, None) for field in dataclasses.fields(given)}
    return None


def _plain(value: Any, depth: int) -> Any:
    """Return a value as JSON can hold it."""
    parts = _parts(value)
    if depth < MAX_DEPTH and parts is not None:
        return _plain_parts(parts, depth + 1)
    if depth < MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [_plain(each, depth + 1) for each in items]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.name if isinstance(value, enum.Enum) else str(value)[:MAX_TEXT]


def _plain_parts(parts: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    plain = {}
    for name in parts:
        try:
            plain[str(name)] = _plain(parts[name], depth)
        except Exception as error:  # a mapping may compute its values, and some may be missing
            plain[str(name)] = f"<{type(error).__name__} when read>"
    return plain
