"""Remove what acts on a terminal from the text of a log."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files import open_without_waiting
from paceline.contract.foreign_records import read_bounded
from paceline.contract.run_folder import MARK_SIZE, parse_mark, times_path

# Colours, and all that acts on a terminal otherwise.
_ESCAPE = re.compile(
    r"(\x1b\[[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ "
    r"-/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def strip_escapes(text: str) -> str:
    """Return a line's text alone: no escape sequences and no control characters but tabs."""
    return _ESCAPE.sub("", text)


def keep_colours(text: str) -> str:
    """Return a line's text and colours."""
    return _ESCAPE.sub(lambda found: found[1] or "", text)


BLOCK = 256  # marks that are read at once

Mark = tuple[int, float]  # an offset of the log, and the time


class LineTimes:
    """The times beside a log. Only those near the last one that was asked for are in memory."""

    def __init__(self, log: Path) -> None:
        self._path = times_path(log)
        self._size = 0  # of the file, when the block was read
        self._offsets: list[int] = []
        self._times: list[float] = []

    def exist(self) -> bool:
        return bool(self._read(0, 1))

    def time_at(self, offset: int) -> float | None:
        """Return when the byte at an offset of the log came; None if nobody knows."""
        if not self._covers(offset):
            self._load(self._search(lambda mark: mark[0] <= offset))
        position = bisect_right(self._offsets, offset)
        return self._times[position - 1] if position else None

    def offset_since(self, time: float) -> int | None:
        """Return where the output since a time begins; None if there is none."""
        found = self._read(self._search(lambda mark: mark[1] < time), 1)
        return found[0][0] if found else None

    def _covers(self, offset: int) -> bool:
        if not self._offsets or offset < self._offsets[0]:
            return False
        return offset < self._offsets[-1] or self._file_size() == self._size

    def _load(self, index: int) -> None:
        self._size = self._file_size()
        marks = self._read(max(0, index - BLOCK // 2), BLOCK)
        self._offsets, self._times = [mark[0] for mark in marks], [mark[1] for mark in marks]
        if len(marks) == BLOCK:
            self._size = -1  # more may follow

    def _search(self, is_before: Callable[[Mark], bool]) -> int:
        """Return how many marks are before what is looked for."""
        low, high = 0, self._file_size() // MARK_SIZE
        while low < high:
            middle = (low + high) // 2
            found = self._read(middle, 1)
            if found and is_before(found[0]):
                low = middle + 1
            else:
                high = middle
        return low

    def _file_size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _read(self, index: int, count: int) -> list[Mark]:
        """Return marks up to the first that is damaged."""
        try:
            with open(open_without_waiting(self._path), "rb") as file:
                file.seek(index * MARK_SIZE)
                content = file.read(count * MARK_SIZE)
        except OSError:
            return []
        found = []
        for start in range(0, len(content), MARK_SIZE):
            mark = parse_mark(content[start : start + MARK_SIZE])
            if mark is None:
                break
            found.append(mark)
        return found


CHUNK = 1 << 17  # bytes
# A longer line comes in pieces. One of a node's log never does: agents cut what several ranks write
# into lines of half of that, each of which begins with its rank.
MAX_LINE = 1 << 18

Piece = tuple[int, bytes]  # the offset at which a line ends, and its bytes


@dataclass(frozen=True)
class Lookup:
    """Which lines to read: all of them, or those that may hold a text."""

    needle: bytes = b""
    # of a progress bar that redraws its line; otherwise only the last one is read
    keeps_states: bool = False

    def may_match(self, block: bytes) -> bool:
        # a colour may cut the text in two
        return not self.needle or self.needle in block or b"\x1b" in block

    def state(self, line: bytes) -> bytes:
        """Return what a terminal shows of a line in the end."""
        return line if self.keeps_states else line.rstrip(b"\r").rpartition(b"\r")[2]


class LineSplitter:
    """Cuts a log that is read from an offset on into lines. Keeps the begun line, of which the end
    is to come.
    """

    def __init__(self, offset: int, lookup: Lookup) -> None:
        self.begun = b""
        self.offset = offset  # of the end of what was read
        self.lookup = lookup

    def feed(self, data: bytes) -> Iterator[Piece]:
        block, end, rest = (self.begun + data).rpartition(b"\n")
        start = self.offset - len(self.begun)
        self.offset += len(data)
        if not self.lookup.keeps_states and len(rest) > MAX_LINE:  # of a progress bar
            rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]  # without what it drew over
        self.begun = rest
        if end and self.lookup.may_match(block):
            for line in block.split(b"\n"):
                start += len(line) + 1
                yield start - 1, self.lookup.state(line)
        if len(self.begun) > MAX_LINE:
            yield self.offset - 1, self.begun
            self.begun = b""

    def finish(self) -> Iterator[Piece]:
        """Yield the begun line: no more will come."""
        if self.begun:
            yield self.offset - 1, self.lookup.state(self.begun)
            self.begun = b""


def skipped_path(log: Path) -> Path:
    """Return the file that says how much of a log is not here. Only the copy of a run on a
    cluster has it.
    """
    return log.with_name(f".{log.name}.skipped")


def skipped_bytes(log: Path) -> int:
    """Return how many bytes at the beginning of a log are not here, but a hole of that size."""
    try:
        text = read_bounded(skipped_path(log), 100)
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdigit() else 0


class LogFile:
    """One log of an attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def size(self) -> int:
        try:
            return self.path.lstat().st_size
        except OSError:
            return 0

    def chunks(self, start: int, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from an offset on. A file that is missing, or not a regular one, is
        empty.
        """
        try:
            descriptor = open_without_waiting(self.path)
        except OSError:
            return
        with open(descriptor, "rb", buffering=0) as file:
            file.seek(start)
            left = CHUNK if end is None else end - start
            while left > 0 and (data := file.read(min(CHUNK, left))):
                yield data
                left -= len(data) if end is not None else 0

    def lines(self, splitter: LineSplitter, end: int) -> Iterator[Piece]:
        """Yield the lines up to an offset, from where the splitter is. It keeps the last one if
        that has no end yet.
        """
        if splitter.offset == 0:
            splitter.offset = min(skipped_bytes(self.path), end)
        for data in self.chunks(splitter.offset, end):
            yield from splitter.feed(data)

    def lines_backwards(self, end: int, lookup: Lookup, first: int = 0) -> Iterator[Piece]:
        """Yield the lines before an offset, the last one first; none that begin before the offset
        `first`.
        """
        rest, rest_end = b"", end  # the end of a line, of which the beginning is to come
        is_begin, first = first == 0, max(first, skipped_bytes(self.path))
        # whether that line has an end of its own; otherwise there is none if it is empty
        is_whole = False
        while end > first:
            start = max(first, end - CHUNK)
            data = b"".join(self.chunks(start, end))
            if len(data) < end - start:
                return  # the file has become shorter
            head, newline, others = (data + rest).partition(b"\n")
            if newline:
                if lookup.may_match(others):
                    found = _reversed_lines(others, start + len(head) + 1, rest_end, lookup)
                    yield from (
                        found
                        if is_whole
                        else (piece for piece in found if piece != (rest_end, b""))
                    )
                rest_end, is_whole = start + len(head), True
            rest, end = head, start
            if not lookup.keeps_states and b"\r" in rest.rstrip(b"\r"):
                rest = b"\r" + lookup.state(rest)  # what comes before it was drawn over
            elif len(rest) > MAX_LINE:
                yield rest_end, rest
                rest, rest_end, is_whole = b"", start, False
        if is_begin and (rest or is_whole):
            yield rest_end, lookup.state(rest)

    def line_start(self, offset: int) -> int:
        """Return where the line with a byte begins; a long one, a part of it."""
        start = max(skipped_bytes(self.path), offset - MAX_LINE)
        if start >= offset:
            return start
        before = b"".join(self.chunks(start, offset))
        return start + before.rfind(b"\n") + 1 if b"\n" in before else start


def _reversed_lines(block: bytes, start: int, end: int, lookup: Lookup) -> Iterator[Piece]:
    """Yield the lines of a block, the last one first. The offsets are those of the block's first
    byte and its end.
    """
    lines = block.split(b"\n")
    ends = []
    for line in lines[:-1]:
        start += len(line)
        ends.append(start)
        start += 1
    ends.append(end)
    for line, line_end in zip(reversed(lines), reversed(ends), strict=True):
        yield line_end, lookup.state(line)
