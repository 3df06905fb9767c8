"""The stream from the reader to the mirror: frames with a length and a checksum, so that no cut passes for data.

All frames of a stream are compressed together: most are small, and much like those before them.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

MARK = b"PLm1"
HEAD = struct.Struct(">4sII")  # the mark, the length of what follows, and its CRC-32
CHUNK = 256 << 10  # bytes of a file in one frame
MAX_BODY = 8 << 20  # bytes of a frame's body
MAX_FRAME = MAX_BODY + (1 << 20)
MAX_NUMBER = (1 << 63) - 1  # what a file system can take

# How the bytes of a file relate to what the mirror has.
# they follow it; the reader knows of nothing that they follow; it is another file now
NEXT, NEW, REPLACED = 0, 1, 2

# The kinds of frames.
FOUND = "found"  # what the names mean that were asked for
DATA = "data"  # bytes of a file that grows, from an offset on
RECORD = "record"  # a small file, whole
CLAIM = "claim"  # a link of `claims`
GONE = "gone"  # a file that is no longer there
JOBS = "jobs"  # what the scheduler says
PASS = "pass"  # everything that had changed has been sent
ALIVE = "alive"  # there is nothing to send
ERROR = "error"  # why there is nothing to watch


class BadStream(Exception):
    """What arrives is not what a reader sends, or it was cut off."""


class CutStream(BadStream):
    """The stream ended within a frame: the connection was lost."""


@dataclass(frozen=True)
class Frame:
    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise BadStream(f"{self.kind} has no {name}")
        return value

    def number(self, name: str) -> int:
        value = self.values.get(name)
        if type(value) is not int or not 0 <= value <= MAX_NUMBER:
            raise BadStream(f"{self.kind} has no {name}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise BadStream(f"{self.kind} has no {name}")
        return value

    def to_bytes(self) -> bytes:
        head = json.dumps({"kind": self.kind, **self.values}, separators=(",", ":")).encode()
        return head + b"\n" + self.body


class FrameWriter:
    """Writes frames to a stream."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._machine = zlib.compressobj(6)

    def write(self, frame: Frame) -> None:
        content = self._machine.compress(frame.to_bytes()) + self._machine.flush(zlib.Z_SYNC_FLUSH)
        self._sink.write(HEAD.pack(MARK, len(content), zlib.crc32(content)) + content)
        self._sink.flush()


class FrameReader:
    """Reads the frames of a stream."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._machine = zlib.decompressobj()

    def read(self) -> Frame | None:
        """Return the next frame; None at the end of the stream. Raises BadStream for anything but a whole frame."""
        head = self._source.read(HEAD.size)
        if not head:
            return None
        if len(head) < HEAD.size:
            raise CutStream("the stream was cut off")
        mark, length, checksum = HEAD.unpack(head)
        if mark != MARK or length > MAX_FRAME:
            raise BadStream("this is not the stream of a reader")
        content = self._source.read(length)
        if len(content) < length:
            raise CutStream("the stream was cut off")
        if zlib.crc32(content) != checksum:
            raise BadStream("a checksum is wrong")
        return _parse(self._decompress(content))

    def _decompress(self, content: bytes) -> bytes:
        try:
            found = self._machine.decompress(content, MAX_FRAME)
        except zlib.error as problem:
            raise BadStream(f"a frame cannot be read: {problem}") from None
        if self._machine.unconsumed_tail or self._machine.unused_data:
            raise BadStream("a frame is too large")
        return found


def _parse(content: bytes) -> Frame:
    line, _, body = content.partition(b"\n")
    try:
        values = json.loads(line)
        kind = values.pop("kind")
        if not isinstance(kind, str):
            raise BadStream("a frame has no kind")
        return Frame(kind, values, body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as problem:
        raise BadStream(f"a frame cannot be read: {problem}") from None
