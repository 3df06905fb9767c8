"""The output of a run: the lines of all ranks and attempts, by time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from pathlib import Path

from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import AttemptFolder, RunFolder
from paceline.watch.log_file import LineTimes, LogFile, Piece, strip_escapes

READ_LIMIT = 8 << 20  # bytes that one `read_new` reads of all logs of an attempt together
WINDOW = 1 << 16  # bytes at the end of a log that `tail` reads at first
_LOG = re.compile(r"(rank|node)-(\d{1,9})\.log")
_RANK = re.compile(r"\[(-?\d{1,9})\] ")
_by_time = itemgetter(0)


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

    @property
    def needle(self) -> bytes:
        return self.grep.encode(errors="surrogateescape")

    def accepts(self, line: LogLine) -> bool:
        if self.rank is not None and line.rank != self.rank:
            return False
        if self.since is not None and line.time is not None and line.time < self.since:
            return False
        return self.grep in line.text or ("\x1b" in line.text and self.grep in line.plain)


OrderedLine = tuple[float, LogLine]  # a line, and the time to sort it by


class RankLog:
    """One log of an attempt, and how far it was read. `rank` is None for a node's log, where each
    line begins with its rank.
    """

    def __init__(
        self, path: Path, attempt: AttemptFolder, rank: int | None, *, keeps_states: bool
    ) -> None:
        self.file = LogFile(path, keeps_states=keeps_states)
        self.attempt, self.rank = attempt, rank
        self._times = LineTimes(path)

    def make_lines(self, pieces: Iterable[Piece], chosen: Filter) -> Iterator[OrderedLine]:
        for offset, content in pieces:
            time = self._times.time_at(offset)
            text = content.decode("utf-8", "replace")
            rank = self.rank
            if rank is None and (found := _RANK.match(text)):
                rank, text = int(found[1]), text[found.end() :]
            line = LogLine(
                time, None if rank is not None and rank < 0 else rank, self.attempt.number, text
            )
            if chosen.accepts(line):
                yield time or 0.0, line

    def rest(self, chosen: Filter, *, complete: bool) -> Iterator[OrderedLine]:
        """Yield the lines from where the log is. `complete` leaves the last one if it has no end
        yet.
        """
        yield from self.make_lines(self.file.lines(self.file.size(), chosen.needle), chosen)
        if not complete:
            yield from self.make_lines(self.file.finish(), chosen)

    def move_to(self, offset: int) -> None:
        self.file = LogFile(self.file.path, offset, keeps_states=self.file.keeps_states)

    def start_since(self, time: float | None) -> int:
        """Return where the lines since a time begin."""
        offset = 0 if time is None else self._times.offset_since(time)
        return self.file.size() if offset is None else self.file.line_start(offset)

    def window(self, end: int, size: int, chosen: Filter) -> tuple[float, list[OrderedLine]]:
        """Return the lines in the last bytes before an offset, and the time after which there are
        no others.
        """
        start = max(0, end - size)
        pieces = self.file.last_lines(start, end, chosen.needle)
        since = self._times.time_at(start) if start else None
        return since or -1.0, list(self.make_lines(pieces, chosen))


class RunLog:
    """The output of a run, and how far `read_new` has read it.

    Of a progress bar that redraws its line, lines hold the last state; with `keeps_states`, all of
    them.
    """

    def __init__(self, folder: RunFolder, *, keeps_states: bool = False) -> None:
        self.folder = folder
        self._keeps_states = keeps_states
        self._logs: dict[Path, RankLog] = {}
        self._first = 1  # the first attempt of which output may still come

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
        chosen = Filter(rank, grep, since)
        found: list[LogLine] = []
        attempts = self._attempts(attempt)
        for each in reversed(attempts):
            logs = self._logs_of(each, rank)
            ends = [log.file.size() for log in logs]
            if each is attempts[-1]:  # others are over: nothing ends their begun lines
                starts = [log.file.line_start(end) for log, end in zip(logs, ends, strict=True)]
                self._first = each.number
                for log, start in zip(logs, starts, strict=True):
                    log.move_to(start)
                ends = starts if complete else ends
            most = max(ends, default=0) if scan is None else scan // max(1, len(logs))
            lines = _last_lines(
                list(zip(logs, ends, strict=True)), chosen, count - len(found), most
            )
            found = lines + found
            if scan is not None:
                scan -= sum(min(end, most) for end in ends)
            if len(found) >= count or (scan is not None and scan <= 0):
                break
        return found

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
        chosen = Filter(rank, grep, since)
        attempts = self._attempts(attempt)
        for each in attempts:
            logs = self._logs_of(each, rank)
            self._first = each.number
            for log in logs:
                log.move_to(log.start_since(since))
            is_last = each is attempts[-1]
            streams = [log.rest(chosen, complete=complete and is_last) for log in logs]
            yield from (line for _, line in merge(*streams, key=_by_time))

    def read_new(
        self, *, rank: int | None = None, grep: str = "", finish: bool = False
    ) -> list[LogLine]:
        """Return what was written since the last call, or since the beginning; a part of it if
        there is much.

        An attempt's lines come before those of the next one. A line without an end waits for it,
        unless the run is over: `finish` returns it.
        """
        chosen = Filter(rank, grep)
        found: list[LogLine] = []
        attempts = [each for each in self._attempts(None) if each.number >= self._first]
        for attempt in attempts:
            is_last, has_more = attempt is attempts[-1], False
            logs = self._logs_of(attempt, rank)
            new: list[OrderedLine] = []
            for log in logs:
                size = log.file.size()
                if size < log.file.offset:
                    log.move_to(0)
                end = min(size, log.file.offset + max(READ_LIMIT // len(logs), WINDOW))
                new += log.make_lines(log.file.lines(end, chosen.needle), chosen)
                has_more |= end < size
                if (finish or not is_last) and end == size:
                    new += log.make_lines(log.file.finish(), chosen)
            found += [line for _, line in sorted(new, key=_by_time)]
            if has_more:
                break
        else:  # output of another node may come late
            self._first = max([self._first, *(each.number for each in attempts[:-1])])
        return found

    def unfinished(self, *, rank: int | None = None) -> list[LogLine]:
        """Return the last lines of logs that have no end yet, such as progress bars, as far as
        `read_new` has read.
        """
        found: list[OrderedLine] = []
        for attempt in self._attempts(None)[-1:]:
            for log in self._logs_of(attempt, rank):
                piece = (log.file.offset - 1, log.file.shown(log.file.begun))
                found += log.make_lines([piece] if log.file.begun else [], Filter(rank))
        return [line for _, line in sorted(found, key=_by_time)]

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
            node = rank // max(1, int(read_fields(self.folder.run_json).get("nproc") or 1))
            own = [each for each in (("rank", rank), ("node", node)) if each in found]
            found = own[:1] or [each for each in found if each[0] == "node"]
        return [self._log(attempt, kind, number) for kind, number in found]

    def _log(self, attempt: AttemptFolder, kind: str, number: int) -> RankLog:
        path = attempt.log(number) if kind == "rank" else attempt.node_log(number)
        if path not in self._logs:
            own = number if kind == "rank" else None
            self._logs[path] = RankLog(path, attempt, own, keeps_states=self._keeps_states)
        return self._logs[path]


def _last_lines(
    logs: Sequence[tuple[RankLog, int]], chosen: Filter, count: int, most: int
) -> list[LogLine]:
    """Return the last lines before the ends of logs, from at most so many bytes of each."""
    size = min(WINDOW, most)
    while True:
        windows = [log.window(end, size, chosen) for log, end in logs]
        # earlier lines may be missing of a log with more output than others
        complete_since = max((since for since, _ in windows), default=-1.0)
        if size >= most or len(logs) == 1:
            complete_since = -1.0
        lines = [each for _, found in windows for each in found if each[0] > complete_since]
        is_old_enough = chosen.since is not None and complete_since >= chosen.since
        if size >= most or len(lines) >= count or is_old_enough:
            lines.sort(key=_by_time)
            return [line for _, line in lines[max(0, len(lines) - count) :]]
        size = min(4 * size, most)
