"""The form in which files go over the connection: lines of JSON, and contents in frames of known length."""

from __future__ import annotations

import json
import struct
import zlib
from typing import IO, Any

from paceline.contract.files.foreign_records import parse_object

CHUNK = 1 << 20  # bytes of a frame, at most
MAX_LINE = 256 << 20  # bytes: a line lists all files of a run
_HEAD = struct.Struct(">IB")  # length, and whether it is compressed


class TooLong(Exception):
    """The other side has sent a line that is longer than any list of files."""


def write_line(sink: IO[bytes], value: dict[str, Any]) -> None:
    sink.write(json.dumps(value).encode() + b"\n")
    sink.flush()


def read_line(source: IO[bytes]) -> dict[str, Any]:
    """Return the next line. Raises EOFError if the other side has ended, or does not make sense.

    Raises TooLong if the line does not end.
    """
    line = source.readline(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        raise TooLong
    try:
        return parse_object(line)
    except ValueError:
        raise EOFError from None


def write_frame(sink: IO[bytes], part: bytes, *, compress: bool) -> None:
    """Write a part of a file. An empty one ends it."""
    packed = zlib.compress(part, 1) if compress and part else part
    if len(packed) < len(part):
        sink.write(_HEAD.pack(len(packed), True) + packed)
    else:
        sink.write(_HEAD.pack(len(part), False) + part)


def read_frame(source: IO[bytes]) -> bytes:
    """Return the next part of a file; empty at its end. Raises EOFError if the other side has ended."""
    length, is_packed = _HEAD.unpack(_read(source, _HEAD.size))
    if length > CHUNK:
        raise EOFError
    part = _read(source, length)
    if not is_packed:
        return part
    try:
        return zlib.decompressobj().decompress(part, CHUNK)
    except zlib.error:
        raise EOFError from None


def _read(source: IO[bytes], length: int) -> bytes:
    part = source.read(length)
    if len(part) != length:
        raise EOFError
    return part
