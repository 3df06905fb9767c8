"""Records that others may have written: JSON that is read within limits, and checked before it is
used.

Whoever lists the runs of a shared scratch folder reads files of other users, of other versions and
of crashed programs. Such a file may be a pipe, endless, deeply nested or malformed; reading it only
raises the errors that a missing file would (`OSError`, `ValueError`).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.contract.files import open_without_waiting

MAX_RECORD = 16 << 20  # bytes of a file with one object
MAX_LINES = 256 << 20  # bytes at the end of a file with one object per line
_LARGEST = 1e18
_LATEST = 1e11  # seconds since 1970
TIMES = ("time", "created", "started", "ended")

NUMBER = (int, float)
Fields = Mapping[str, "type | tuple[type, ...]"]
T = TypeVar("T")


def read_bounded(path: Path | str, limit: int = MAX_RECORD) -> bytes:
    """Return a regular file's content. Raises ValueError if there is more than `limit`."""
    content = read_tail(path, limit + 1)
    if len(content) > limit:
        raise ValueError(f"{os.path.basename(path)} has more than {limit} bytes")
    return content


def read_tail(path: Path | str, size: int) -> bytes:
    """Return the end of a regular file."""
    with open(open_without_waiting(path, follow=True), "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        return file.read(min(size, end))


def read_text(path: Path | str, limit: int = MAX_RECORD) -> str:
    """Return the text at the end of a regular file; empty if it cannot be read."""
    try:
        return read_tail(path, limit).decode(errors="replace")
    except OSError:
        return ""


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse JSON. Raises ValueError for all that is no object, whatever the reason."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
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
    return {
        key: value
        for key, value in table.items()
        if key not in expected or _is_valid(key, value, expected[key])
    }


def read_fields(path: Path | str, expected: Fields | None = None) -> dict[str, Any]:
    """Return what is valid of the object in a file; nothing if it is missing or damaged."""
    try:
        return keep_valid(read_object(path), expected or {})
    except (OSError, ValueError):
        return {}


def _is_valid(key: str, value: Any, types: type | tuple[type, ...]) -> bool:
    if not isinstance(value, types) or isinstance(value, bool) != (types is bool):
        return False
    if isinstance(value, NUMBER):
        return 0 <= value <= _LATEST if key in TIMES else abs(value) <= _LARGEST
    return True


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


_TYPES: dict[str, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": NUMBER,
    "list": list,
    "dict": dict,
}


def _fits(value: Any, annotation: str) -> bool:
    """Return whether a parsed value has the type of an annotation such as `dict[str, str] | None`;
    one of another kind fits all.
    """
    if annotation.endswith(" | None"):
        return value is None or _fits(value, annotation.removesuffix(" | None"))
    name, _, items = annotation.removesuffix("]").partition("[")
    item = items.removeprefix("str, ")  # keys are texts
    if name not in _TYPES:
        return True
    if not isinstance(value, _TYPES[name]) or isinstance(value, bool) != (name == "bool"):
        return False
    parts = value.values() if isinstance(value, dict) else value if name == "list" else ()
    return all(_fits(each, item) for each in parts)


class LineWriter:
    """An append-only file of whole lines. Everything is a no-op when `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._has_warned = False

    def append(self, text: str) -> bool:
        """Append whole lines in one write, so that a reader never sees parts of two lines mixed.

        Returns False if they are lost.
        """
        if self.path is None or not text:
            return True
        # file names may hold any bytes; in JSON this is an escape
        data = text.encode(errors="backslashreplace")
        try:
            self._write(self.path, data)
        except OSError as error:
            self.close()  # a file server that was away for a moment invalidates open files
            if not self._has_warned:
                self._has_warned = True
                message = f"could not write to {self.path} ({error.strerror}); some lines are lost"
                print(f"paceline: {message}", file=sys.stderr, flush=True)
            return False
        return True

    def _write(self, path: Path, data: bytes) -> None:
        if self._descriptor is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
            size = os.fstat(self._descriptor).st_size
            # A killed writer or a full disk may have left half a line: end it, so that only that
            # line is lost.
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
        if os.write(self._descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventWriter(LineWriter):
    """`events/<writer>.jsonl`: what happened and when, as one writer saw it."""

    def write(self, event: str, **fields: Any) -> None:
        line = {"time": time.time(), "event": event, **fields}
        self.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
