"""The script's own settings, as `run.config` takes them: a namespace, a data class or a mapping,
as plain values.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import types
from collections.abc import Mapping
from typing import Any

from paceline.contract.redaction import redact_values
from paceline.errors import UsageError

MAX_TEXT = 1000  # characters of a value that is no plain value


def plain_config(given: Any) -> dict[str, Any]:
    """Return settings as JSON can hold them. Secrets are hidden, by their names.

    What cannot be written is replaced by a note in angle brackets: settings must not end a run.
    """
    values = _parts(given)
    if values is None:
        raise UsageError(
            f"run.config got a {type(given).__name__}.",
            hint="Pass the namespace of argparse, a data class or a dictionary: run.config(args).",
        )
    return redact_values(_plain_parts(values, [given]))


def _parts(given: Any) -> Mapping[Any, Any] | None:
    """Return the items of a value that has named parts."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, (argparse.Namespace, types.SimpleNamespace)):
        return vars(given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name, None) for field in dataclasses.fields(given)}
    return None


def _plain(value: Any, outer: list[Any]) -> Any:
    """Return a value as JSON can hold it. `outer` are the values that it is a part of."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    parts = _parts(value)
    if parts is None and not isinstance(value, (list, tuple, set, frozenset)):
        return str(value)[:MAX_TEXT] if not isinstance(value, str) else str(value)
    if any(each is value for each in outer):
        return f"<{type(value).__name__} that contains itself>"
    inner = [*outer, value]
    return [_plain(each, inner) for each in value] if parts is None else _plain_parts(parts, inner)


def _plain_parts(parts: Mapping[Any, Any], outer: list[Any]) -> dict[str, Any]:
    plain = {}
    for name in parts:
        try:
            plain[str(name)] = _plain(parts[name], outer)
        except Exception as error:  # a mapping may compute its values, and some may be missing
            plain[str(name)] = f"<{type(error).__name__} when read>"
    return plain
