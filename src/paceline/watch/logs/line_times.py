"""Look up when the output of a log came."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from paceline.contract.files.log_times import MARK_SIZE, parse_mark, times_path
from paceline.contract.files.shared_folders import open_without_waiting

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
