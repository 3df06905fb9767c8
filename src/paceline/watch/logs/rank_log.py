"""The log of one rank, or of one node in large runs: its lines with their ranks and times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from paceline.contract.run_folder import AttemptFolder
from paceline.watch.logs.escapes import strip_escapes
from paceline.watch.logs.line_times import LineTimes
from paceline.watch.logs.log_file import LineSplitter, LogFile, Lookup, Piece

_RANK = re.compile(r"\[(-?\d{1,9})\] ")


@dataclass(frozen=True)
class LogLine:
    """A line of output. The text may hold anything, also escape sequences; `plain` has none."""

    time: float | None  # when it came, in seconds since 1970; None if nobody recorded it
    rank: int | None  # None for a line of no rank, such as torchrun's own
    attempt: int
    text: str

    @property
    def plain(self) -> str:
        return strip_escapes(self.text)


@dataclass(frozen=True)
class Filter:
    """Which lines to read."""

    rank: int | None = None
    grep: str = ""  # a text that the line has, as a terminal shows it
    since: float | None = None
    keeps_states: bool = False

    @property
    def lookup(self) -> Lookup:
        return Lookup(self.grep.encode(errors="surrogateescape"), self.keeps_states)

    def accepts(self, line: LogLine) -> bool:
        if self.rank is not None and line.rank != self.rank:
            return False
        return (
            not self.grep
            or self.grep in line.text
            or ("\x1b" in line.text and self.grep in line.plain)
        )


OrderedLine = tuple[float, LogLine]  # a line, and the time to sort it by


class RankLog:
    """One log of an attempt. `rank` is None for a node's log, where each line begins with its
    rank.
    """

    def __init__(self, file: LogFile, attempt: AttemptFolder, rank: int | None) -> None:
        self.file, self.attempt, self.rank = file, attempt, rank
        self._marks = LineTimes(file.path)
        self._has_times = False
        # when the attempt began, when the log was last written, and its size
        self._lifetime = (0.0, 0.0, 0)

    def forwards(self, splitter: LineSplitter, end: int, chosen: Filter) -> Iterator[OrderedLine]:
        """Yield the lines up to an offset, from where the splitter is."""
        self._refresh()
        return self.make_lines(self.file.lines(splitter, end), chosen)

    def backwards(self, end: int, chosen: Filter, first: int = 0) -> Iterator[OrderedLine]:
        """Yield the lines before an offset, the last one first; none that begin before the offset
        `first`.
        """
        self._refresh()
        pieces = self.file.lines_backwards(end, chosen.lookup, first)
        since = chosen.since
        if since is not None:
            pieces = takewhile(lambda piece: self._time(piece[0])[0] >= since, pieces)
        return self.make_lines(pieces, chosen)

    def start_since(self, time: float | None) -> int:
        """Return where the lines since a time begin."""
        if time is None:
            return 0
        self._refresh()
        if self._has_times:
            offset: int | None = self._marks.offset_since(time)
        else:
            started, ended, size = self._lifetime
            share = (time - started) / (ended - started) if ended > started else float(time > ended)
            offset = int(min(1.0, max(0.0, share)) * size)
        return self.file.size() if offset is None else self.file.line_start(offset)

    def make_lines(self, pieces: Iterable[Piece], chosen: Filter) -> Iterator[OrderedLine]:
        for offset, content in pieces:
            order, time = self._time(offset)
            text = content.decode("utf-8", "replace")
            rank = self.rank
            if rank is None and (found := _RANK.match(text)):
                rank, text = int(found[1]), text[found.end() :]
            line = LogLine(
                time, None if rank is not None and rank < 0 else rank, self.attempt.number, text
            )
            if chosen.accepts(line):
                yield order, line

    def _time(self, offset: int) -> tuple[float, float | None]:
        """Return the time to sort a line by, and when it came if that is known."""
        if self._has_times:
            time = self._marks.time_at(offset)
            return time or 0.0, time
        started, ended, size = self._lifetime
        return started + (ended - started) * min(1.0, offset / max(1, size)), None

    def _refresh(self) -> None:
        """Look at the files again: they grow.

        Lines without a time are put between the attempt's start and the time when the log was last
        written.
        """
        self._has_times = self._has_times or self._marks.exist()
        try:
            written = self.file.path.lstat()
            started = self.attempt.start if self.attempt.start.exists() else self.attempt.path
            self._lifetime = (
                min(started.lstat().st_mtime, written.st_mtime),
                written.st_mtime,
                written.st_size,
            )
        except OSError:
            self._lifetime = (0.0, 0.0, 0)
