"""The log of one rank, or of one node in large runs: its lines with their ranks and times."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import takewhile
from operator import itemgetter
from pathlib import Path

from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.watch.log_file import LineSplitter, LineTimes, LogFile, Lookup, Piece, strip_escapes

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


READ_LIMIT = 8 << 20  # bytes that one `read_new` reads of all logs together
_LOG = re.compile(r"(rank|node)-(\d{1,9})\.log")
_by_time = itemgetter(0)


class RunLog:
    """The output of a run, and how far `read_new` has read it.

    Of a progress bar that redraws its line, lines hold the last state; with `keeps_states`, all of
    them.
    """

    def __init__(self, folder: RunFolder, *, keeps_states: bool = False) -> None:
        self.folder = folder
        self._keeps_states = keeps_states
        self._logs: dict[Path, RankLog] = {}
        self._splitters: dict[Path, LineSplitter] = {}  # how far each log was read
        self._current = 0  # the attempt that `read_new` reads; 0 at first
        self._previous = 0  # the one before it: output of another node may come late
        self._has_more = False  # whether `read_new` has left something for the next time

    def tail(
        self,
        count: int,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        grep: str = "",
        since: float | None = None,
        complete: bool = False,
        scan: int | None = None,
    ) -> list[LogLine]:
        """Return the last lines, oldest first. `read_new` goes on after them.

        The last line of a log may have no end yet; `complete` leaves it to `read_new`. A search for
        a text that is nowhere reads everything, unless `scan` says how many bytes at the end of the
        output are enough.
        """
        chosen = Filter(rank, grep, since, self._keeps_states)
        found: list[LogLine] = []
        attempts = self._attempts(attempt)
        for each in reversed(attempts):
            logs = self._logs_of(each, rank)
            sizes = [log.file.size() for log in logs]
            starts = [log.file.line_start(size) for log, size in zip(logs, sizes, strict=True)]
            is_last = each is attempts[-1]  # others are over: nothing ends their begun lines
            ends = starts if complete and is_last else sizes
            if is_last:
                self._go_on_after(each, logs, starts)
            most = max(ends, default=0) if scan is None else scan // max(1, len(logs))
            streams = [
                log.backwards(end, chosen, max(0, end - most))
                for log, end in zip(logs, ends, strict=True)
            ]
            for _, line in merge(*reversed(streams), key=_by_time, reverse=True):
                if len(found) >= count:
                    return found[::-1]
                found.append(line)
            if scan is not None and (scan := scan - sum(min(end, most) for end in ends)) <= 0:
                break
        return found[::-1]

    def lines(
        self,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        grep: str = "",
        since: float | None = None,
        complete: bool = False,
    ) -> Iterator[LogLine]:
        """Yield all lines, oldest first. `read_new` goes on after them. See `tail` for the
        parameters.
        """
        chosen = Filter(rank, grep, since, self._keeps_states)
        attempts = self._attempts(attempt)
        for each in attempts:
            logs = self._logs_of(each, rank)
            self._move_to(each.number)
            for log in logs:
                self._splitters[log.file.path] = LineSplitter(log.start_since(since), chosen.lookup)
            streams = [
                self._forwards(log, chosen, complete and each is attempts[-1]) for log in logs
            ]
            for _, line in merge(*streams, key=_by_time):
                yield line

    def read_new(
        self, *, rank: int | None = None, grep: str = "", finish: bool = False
    ) -> list[LogLine]:
        """Return what was written since the last call, or since the beginning; a part of it if
        there is much.

        An attempt's lines come before those of the next one. A line without an end waits for it,
        unless the run is over: `finish` returns it.
        """
        chosen = Filter(rank, grep, None, self._keeps_states)
        attempts = {each.number: each for each in self._attempts(None)}
        if not self._current and attempts:
            self._current = min(attempts)
        found: list[LogLine] = []
        while not found and self._current in attempts:
            self._has_more = False
            for number in (self._previous, self._current):
                if number in attempts:
                    found += self._read_attempt(attempts[number], chosen, finish=False)
            later = [number for number in attempts if number > self._current]
            if found or self._has_more:
                continue
            if later:
                found += self._read_attempt(attempts[self._current], chosen, finish=True)
                self._move_to(min(later))
            elif finish:
                return self._read_attempt(attempts[self._current], chosen, finish=True)
            else:
                break
        return found

    def unfinished(self, *, rank: int | None = None) -> list[LogLine]:
        """Return the last lines of logs that have no end yet, such as progress bars, as far as
        `read_new` has read.
        """
        chosen = Filter(rank, "", None, keeps_states=False)
        found: list[OrderedLine] = []
        for path, splitter in self._splitters.items():
            log = self._logs[path]
            if splitter.begun and log.attempt.number == self._current:
                piece = (splitter.offset - 1, chosen.lookup.state(splitter.begun))
                found += log.make_lines([piece], chosen)
        return [line for _, line in sorted(found, key=_by_time)]

    def _read_attempt(
        self, attempt: AttemptFolder, chosen: Filter, *, finish: bool
    ) -> list[LogLine]:
        logs = self._logs_of(attempt, chosen.rank)
        found: list[OrderedLine] = []
        for log in logs:
            path, size = log.file.path, log.file.size()
            splitter = self._splitters.get(path)
            if splitter is None or size < splitter.offset:
                splitter = self._splitters[path] = LineSplitter(0, chosen.lookup)
            splitter.lookup = chosen.lookup
            if size > splitter.offset:
                limit = max(READ_LIMIT // len(logs), 1 << 16)
                found += log.forwards(splitter, min(size, splitter.offset + limit), chosen)
                self._has_more |= splitter.offset < size
            if finish:
                found += log.make_lines(splitter.finish(), chosen)
        return [line for _, line in sorted(found, key=_by_time)]

    def _forwards(self, log: RankLog, chosen: Filter, complete: bool) -> Iterator[OrderedLine]:
        splitter = self._splitters[log.file.path]
        yield from log.forwards(splitter, log.file.size(), chosen)
        if not complete:
            yield from log.make_lines(splitter.finish(), chosen)

    def _go_on_after(self, attempt: AttemptFolder, logs: list[RankLog], starts: list[int]) -> None:
        """Let `read_new` go on where the last line of each log begins that has no end yet."""
        self._move_to(attempt.number)
        for log, start in zip(logs, starts, strict=True):
            lookup = Filter(keeps_states=self._keeps_states).lookup
            self._splitters[log.file.path] = LineSplitter(start, lookup)

    def _move_to(self, number: int) -> None:
        self._previous, self._current = self._current, number

    def _attempts(self, number: int | None) -> list[AttemptFolder]:
        found = [each for each in self.folder.attempts() if not each.path.is_symlink()]
        return [each for each in found if number is None or each.number == number]

    def _logs_of(self, attempt: AttemptFolder, rank: int | None) -> list[RankLog]:
        """Return the logs of an attempt in which a rank's lines may be, or all."""
        try:
            names = [entry.name for entry in os.scandir(attempt.path)]
        except OSError:
            return []
        found = sorted(
            (match[1], int(match[2])) for name in names if (match := _LOG.fullmatch(name))
        )
        if rank is not None:
            own = [("rank", rank)] if ("rank", rank) in found else []
            node = (
                "node",
                rank // max(1, int(read_fields(self.folder.run_json).get("nproc") or 1)),
            )
            found = own or (
                [node] if node in found else [each for each in found if each[0] == "node"]
            )
        return [self._log(attempt, kind, number) for kind, number in found]

    def _log(self, attempt: AttemptFolder, kind: str, number: int) -> RankLog:
        path = attempt.log(number) if kind == "rank" else attempt.node_log(number)
        if path not in self._logs:
            self._logs[path] = RankLog(LogFile(path), attempt, number if kind == "rank" else None)
        return self._logs[path]
