"""A log as it grows: its lines, and the times beside it."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path

from paceline.contract.files import open_without_waiting
from paceline.contract.foreign_records import read_text
from paceline.contract.run_folder import MARK_SIZE, parse_mark, times_path

# Colours, and all that acts on a terminal otherwise.
_ESCAPE = re.compile(
    r"(\x1b\[[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ "
    r"-/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
CHUNK = 1 << 17  # bytes
# A longer line comes in pieces. One of a node's log never does: agents cut what several ranks write
# into lines of half of that, each of which begins with its rank.
MAX_LINE = 1 << 18

Mark = tuple[int, float]  # an offset of the log, and the time
Piece = tuple[int, bytes]  # the offset at which a line ends, and its bytes


def strip_escapes(text: str) -> str:
    """Return a line's text alone: no escape sequences and no control characters but tabs."""
    return _ESCAPE.sub("", text)


def keep_colours(text: str) -> str:
    """Return a line's text and colours."""
    return _ESCAPE.sub(lambda found: found[1] or "", text)


def file_size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def read_range(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield a part of a file. One that is missing, or not a regular one, is empty."""
    try:
        descriptor = open_without_waiting(path)
    except OSError:
        return
    with open(descriptor, "rb", buffering=0) as file:
        file.seek(start)
        while start < end and (data := file.read(min(CHUNK, end - start))):
            start += len(data)
            yield data


def skipped_path(log: Path) -> Path:
    """Return the file that says how much of a log is not here. Only the copy of a run on a
    cluster has it.
    """
    return log.with_name(f".{log.name}.skipped")


def skipped_bytes(log: Path) -> int:
    """Return how many bytes at the beginning of a log are not here, but a hole of that size."""
    return int(read_text(skipped_path(log), 100) or 0)


class LogFile:
    """A log that is read from an offset on, line by line. A begun line waits for its end."""

    def __init__(self, path: Path, offset: int = 0, *, keeps_states: bool = False) -> None:
        """Of a progress bar that redraws its line, lines hold the last state; with `keeps_states`,
        all of them.
        """
        self.path, self.keeps_states = path, keeps_states
        self.offset = max(offset, min(skipped_bytes(path), self.size()))  # of what was read
        self.begun = b""

    def size(self) -> int:
        return file_size(self.path)

    def lines(self, end: int, needle: bytes = b"") -> Iterator[Piece]:
        """Yield the lines up to an offset; with a text to look for, those that may have it."""
        for data in read_range(self.path, self.offset, end):
            start = self.offset - len(self.begun)
            self.offset += len(data)
            block, newline, self.begun = (self.begun + data).rpartition(b"\n")
            # a colour may cut the text in two
            if newline and (needle in block or b"\x1b" in block):
                for line in block.split(b"\n"):
                    start += len(line) + 1
                    yield start - 1, self.shown(line)
            if len(self.begun) > MAX_LINE and not self.keeps_states:  # of a progress bar
                # without what it drew over
                self.begun = self.begun[max(0, self.begun.rstrip(b"\r").rfind(b"\r")) :]
            if len(self.begun) > MAX_LINE:
                yield self.offset - 1, self.begun
                self.begun = b""

    def finish(self) -> Iterator[Piece]:
        """Yield the begun line: no more will come."""
        if self.begun:
            yield self.offset - 1, self.shown(self.begun)
            self.begun = b""

    def shown(self, line: bytes) -> bytes:
        """Return what a terminal shows of a line in the end."""
        return line if self.keeps_states else line.rstrip(b"\r").rpartition(b"\r")[2]

    def line_start(self, offset: int) -> int:
        """Return where the line with a byte begins; a long one, a part of it."""
        start = max(skipped_bytes(self.path), offset - MAX_LINE)
        before = b"".join(read_range(self.path, start, offset))
        return start + before.rfind(b"\n") + 1

    def last_lines(self, start: int, end: int, needle: bytes = b"") -> Iterator[Piece]:
        """Yield the lines between two offsets, the first one whole, the last one with or without
        its end.
        """
        part = LogFile(self.path, self.line_start(start), keeps_states=self.keeps_states)
        yield from part.lines(end, needle)
        yield from part.finish()


class LineTimes:
    """The times beside a log. Only those near the last one that was asked for are in memory."""

    BLOCK = 256  # marks that are read at once

    def __init__(self, log: Path) -> None:
        self._path = times_path(log)
        self._block: list[Mark] = []

    def time_at(self, offset: int) -> float | None:
        """Return when the byte at an offset of the log came; None if nobody knows."""
        if not self._block or not self._block[0][0] <= offset < self._block[-1][0]:
            marks = range(file_size(self._path) // MARK_SIZE)
            index = bisect_left(marks, True, key=lambda mark: self._is_after(mark, offset))
            self._block = self._read(max(0, index - 1), self.BLOCK)
        position = bisect_right(self._block, offset, key=lambda mark: mark[0])
        return self._block[position - 1][1] if position else None

    def _is_after(self, index: int, offset: int) -> bool:
        found = self._read(index, 1)
        return not found or found[0][0] > offset

    def _read(self, index: int, count: int) -> list[Mark]:
        """Return marks up to the first that is damaged."""
        start = index * MARK_SIZE
        content = b"".join(read_range(self._path, start, start + count * MARK_SIZE))
        found = []
        for begin in range(0, len(content), MARK_SIZE):
            mark = parse_mark(content[begin : begin + MARK_SIZE])
            if mark is None:
                break
            found.append(mark)
        return found
