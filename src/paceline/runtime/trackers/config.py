"""The script's own settings, as `run.config` takes them: a namespace, a data class or a mapping, as plain values."""

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
    """Return settings as JSON can hold them. Secrets are hidden, by their names."""
    values = _parts(given)
    if values is None:
        raise UsageError(
            f"run.config got a {type(given).__name__}.",
            hint="Pass the namespace of argparse, a data class or a dictionary: run.config(args).",
        )
    return redact_values({str(name): _plain(value) for name, value in values.items()})


def _parts(given: Any) -> Mapping[Any, Any] | None:
    """Return the items of a value that has named parts."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, (argparse.Namespace, types.SimpleNamespace)):
        return vars(given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    parts = _parts(value)
    if parts is not None:
        return {str(name): _plain(each) for name, each in parts.items()}
    if isinstance(value, str):
        return str(value)
    return str(value)[:MAX_TEXT]
