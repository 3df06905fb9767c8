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


def plain_config(given: Any) -> dict[str, Any]:
    """Return settings as JSON can hold them. Secrets are hidden, by their names."""
    if _parts(given) is None:
        raise UsageError(
            f"run.config got a {type(given).__name__}.",
            hint="Pass the namespace of argparse, a data class or a dictionary: run.config(args).",
        )
    try:
        text = json.dumps(given, default=_encode)
    except Exception as error:  # whatever the objects in it raise
        raise UsageError(
            f"run.config cannot write these settings as JSON: {error}.",
            hint="Pass plain values, or leave out what is none.",
        ) from error
    # JSON itself has no NaN and no infinity
    return redact_values(json.loads(text, parse_constant=str))


def _parts(given: Any) -> Mapping[Any, Any] | None:
    """Return the items of a value that has named parts."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, (argparse.Namespace, types.SimpleNamespace)):
        return vars(given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name, None) for field in dataclasses.fields(given)}
    return None


def _encode(value: Any) -> Any:
    """Return what `json.dumps` writes in place of a value that it does not know."""
    parts = _parts(value)
    if parts is not None:
        return dict(parts)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)[:MAX_TEXT]
