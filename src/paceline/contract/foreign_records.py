"""Records that others may have written: JSON that is read within limits, and checked before it is
used.

Whoever lists the runs of a shared scratch folder reads files of other users, of other versions and
of crashed programs. Such a file may be a pipe, endless, deeply nested or malformed; reading it only
raises the errors that a missing file would (`OSError`, `ValueError`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.contract.files import open_regular

MAX_RECORD = 16 << 20  # bytes of a file with one object
MAX_LINES = 256 << 20  # bytes at the end of a file with one object per line
CHUNK = 1 << 18  # bytes per call
_MAX_DIGITS = 300  # of an integer, so that it fits into a float
_LARGEST = 1e18
_LATEST = 1e11  # seconds since 1970
TIMES = ("time", "created", "started", "ended")

NUMBER = (int, float)
Fields = Mapping[str, "type | tuple[type, ...]"]
T = TypeVar("T")


def read_bounded(path: Path | str, limit: int = MAX_RECORD) -> bytes:
    """Return a regular file's content. Raises ValueError if there is more than `limit`."""
    descriptor, _ = open_regular(path, follow=True)
    try:
        content = _read(descriptor, limit + 1)
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise ValueError(f"{os.path.basename(path)} has more than {limit} bytes")
    return content


def read_tail(path: Path | str, size: int) -> bytes:
    """Return the end of a regular file."""
    descriptor, known = open_regular(path, follow=True)
    try:
        if (skipped := known.st_size - size) > 0:
            os.lseek(descriptor, skipped, os.SEEK_SET)
        return _read(descriptor, size)
    finally:
        os.close(descriptor)


def _read(descriptor: int, size: int) -> bytes:
    """Read up to `size` bytes, and take no memory for more than there is."""
    parts = []
    while size > 0 and (part := os.read(descriptor, min(size, CHUNK))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def parse(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for all that cannot be parsed, whatever the reason."""
    try:
        return _DECODER.decode(
            text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    value = parse(text)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def read_object(path: Path | str) -> dict[str, Any]:
    """Return the object in a file. Raises OSError or ValueError."""
    return parse_object(read_bounded(path))


def read_objects(path: Path | str, limit: int = MAX_LINES) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file. A missing file is empty; other lines are skipped."""
    try:
        lines = read_tail(path, limit).splitlines()
    except OSError:
        return
    yield from parse_objects(lines)


def parse_objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects in lines, without what a crash has cut off or somebody else has written."""
    for line in lines:
        with suppress(ValueError):
            yield parse_object(line)


def keep_valid(table: dict[str, Any], expected: Fields) -> dict[str, Any]:
    """Return an object without the values that have another type than they should, or are not
    finite.
    """
    wrong = [
        key
        for key, value in table.items()
        if (types := expected.get(key)) is not None
        # Quick, because lists of runs have many: a value of exactly this type, which is none of
        # numbers.
        and not (type(value) is types and types is not int)
        and not _is_valid(key, value, types)
    ]
    return {key: value for key, value in table.items() if key not in wrong} if wrong else table


def read_fields(path: Path | str, expected: Fields | None = None) -> dict[str, Any]:
    """Return what is valid of the object in a file; nothing if it is missing or damaged."""
    try:
        return keep_valid(read_object(path), expected or {})
    except (OSError, ValueError):
        return {}


def _is_valid(key: str, value: Any, types: type | tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return types is bool
    if isinstance(value, NUMBER) and (not math.isfinite(value) or abs(value) > _LARGEST):
        return False
    if key in TIMES and isinstance(value, NUMBER):
        return 0 <= value <= _LATEST
    return isinstance(value, types)


def make(cls: type[T], table: Mapping[str, Any]) -> T:
    """Make an instance of a dataclass from an object: unknown keys are ignored, and wrong types
    are a ValueError.
    """
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name in table:
            value = table[field.name]
            if not _fits(value, str(field.type)):
                raise ValueError(f"{field.name} should be {field.type}, not {type(value).__name__}")
            values[field.name] = value
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"it has no {field.name}")
    return cls(**values)


def _fits(value: Any, annotation: str) -> bool:
    """Return whether a parsed value has the type of an annotation; only those that our records use
    are known.
    """
    if annotation.endswith(" | None"):
        return value is None or _fits(value, annotation.removesuffix(" | None"))
    if annotation in ("str", "bool", "dict[str, Any]"):
        return isinstance(value, {"str": str, "bool": bool}.get(annotation, dict))
    if annotation in ("int", "float"):
        return isinstance(value, int if annotation == "int" else NUMBER) and not isinstance(
            value, bool
        )
    if annotation == "list[str]":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if annotation == "dict[str, str]":
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if annotation.startswith("dict[str, dict"):
        return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())
    return True


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(text)


_DECODER = json.JSONDecoder(parse_int=_integer)
