"""The output of a run: the lines of all ranks and attempts, by time, until it is over."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from pathlib import Path

from paceline.contract.run_folder import DONE, AttemptFolder, RunFolder
from paceline.watch.log_file import LineTimes, LogFile, Piece, strip_escapes
from paceline.watch.records import Record, read_record
from paceline.watch.run_status import newest_verdict

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

    @property
    def needle(self) -> bytes:
        return self.grep.encode(errors="surrogateescape")

    def accepts(self, line: LogLine) -> bool:
        if self.rank is not None and line.rank != self.rank:
            return False
        return self.grep in line.text or ("\x1b" in line.text and self.grep in line.plain)


OrderedLine = tuple[float, LogLine]  # a line, and the time to sort it by


class RankLog:
    """One log of an attempt, and how far it was read. `rank` is None for a node's log, where each
    line begins with its rank.
    """

    def __init__(self, path: Path, attempt: AttemptFolder, rank: int | None) -> None:
        self.file = LogFile(path)
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

    def read(
        self, chosen: Filter, *, finish: bool, limit: int | None = None
    ) -> Iterator[OrderedLine]:
        """Yield the lines from where the log is, of at most so many bytes. `finish`: also the last
        one, if it has no end.
        """
        size = self.file.size()
        if size < self.file.offset:
            self.move_to(0)
        end = size if limit is None else min(size, self.file.offset + limit)
        yield from self.make_lines(self.file.lines(end, chosen.needle), chosen)
        if finish and end == size:
            yield from self.make_lines(self.file.finish(), chosen)

    def move_to(self, offset: int) -> None:
        self.file = LogFile(self.file.path, offset)

    def window(self, end: int, size: int, chosen: Filter) -> tuple[float, list[OrderedLine]]:
        """Return the lines in the last bytes before an offset, and the time after which there are
        no others.
        """
        start = max(0, end - size)
        pieces = self.file.last_lines(start, end, chosen.needle)
        since = self._times.time_at(start) if start else -1.0
        return math.inf if since is None else since, list(self.make_lines(pieces, chosen))


class RunLog:
    """The output of a run, and how far `read_new` has read it.

    Of a progress bar that redraws its line, lines hold the last state.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._logs: dict[Path, RankLog] = {}
        self._first = 1  # the first attempt of which output may still come

    def tail(
        self,
        count: int,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        grep: str = "",
        complete: bool = False,
        scan: int | None = None,
    ) -> list[LogLine]:
        """Return the last lines, oldest first. `read_new` goes on after them.

        The last line of a log may have no end yet; `complete` leaves it to `read_new`. A search for
        a text that is nowhere reads everything, unless `scan` says how many bytes at the end of the
        output are enough.
        """
        chosen = Filter(rank, grep)
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
        complete: bool = False,
    ) -> Iterator[LogLine]:
        """Yield all lines, oldest first. `read_new` goes on after them. See `tail` for the
        parameters.
        """
        chosen = Filter(rank, grep)
        attempts = self._attempts(attempt)
        for each in attempts:
            logs = self._logs_of(each, rank)
            self._first = each.number
            for log in logs:
                log.move_to(0)
            finish = not complete or each is not attempts[-1]
            yield from _merge(log.read(chosen, finish=finish) for log in logs)

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
            logs = self._logs_of(attempt, rank)
            limit = max(READ_LIMIT // max(1, len(logs)), WINDOW)
            ends = finish or attempt is not attempts[-1]
            found += _merge(log.read(chosen, finish=ends, limit=limit) for log in logs)
            if any(log.file.offset < log.file.size() for log in logs):
                break
        else:  # output of another node may come late
            self._first = max([self._first, *(each.number for each in attempts[:-1])])
        return found

    def unfinished(self, *, rank: int | None = None) -> list[LogLine]:
        """Return the last lines of logs that have no end yet, such as progress bars, as far as
        `read_new` has read.
        """
        streams = []
        for attempt in self._attempts(None)[-1:]:
            for log in self._logs_of(attempt, rank):
                piece = (log.file.offset - 1, log.file.shown(log.file.begun))
                streams.append(log.make_lines([piece] if log.file.begun else [], Filter(rank)))
        return list(_merge(streams))

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
        own = [each for each in found if each[0] == "node" or each[1] == rank]
        return [self._log(attempt, *each) for each in (found if rank is None else own)]

    def _log(self, attempt: AttemptFolder, kind: str, number: int) -> RankLog:
        path = attempt.log(number) if kind == "rank" else attempt.node_log(number)
        if path not in self._logs:
            own = number if kind == "rank" else None
            self._logs[path] = RankLog(path, attempt, own)
        return self._logs[path]


def _merge(streams: Iterable[Iterator[OrderedLine]]) -> Iterator[LogLine]:
    """Yield the lines of several logs, by time."""
    return (line for _, line in merge(*streams, key=_by_time))


def _last_lines(
    logs: Sequence[tuple[RankLog, int]], chosen: Filter, count: int, most: int
) -> list[LogLine]:
    """Return the last lines before the ends of logs, from at most so many bytes of each."""
    size = min(WINDOW, most)
    while True:
        windows = [log.window(end, size, chosen) for log, end in logs]
        # Of a log with more output than others, earlier lines are missing.
        complete_since = max((since for since, _ in windows), default=-1.0)
        is_all = size >= most
        if is_all or len(logs) == 1:
            complete_since = -1.0
        lines = [each for _, found in windows for each in found if each[0] > complete_since]
        if is_all or len(lines) >= count:
            lines.sort(key=_by_time)
            return [line for _, line in lines[max(0, len(lines) - count) :]]
        size = min(4 * size, most)


POLL_INTERVAL = 0.3  # seconds between reads of a file
PAUSES = (0.2, 2.0)  # seconds between reads of logs: while there is news, and at most
QUERY_INTERVAL = 2.0  # seconds between looks; the scheduler is asked at its own interval


class RunMonitor:
    """Knows whether a run is over. Looks now and then, and at once after a new verdict."""

    def __init__(
        self, folder: RunFolder, read: Callable[[RunFolder], Record] = read_record
    ) -> None:
        self.folder = folder
        self.read = read
        self.record = read(folder)
        self.next = time.monotonic() + QUERY_INTERVAL
        self.verdict = newest_verdict(folder)
        self.certain = self.record.is_over and self.record.status == DONE

    def is_over(self) -> bool:
        """A job being requeued looks over for a moment, so any end but `done` is checked twice."""
        verdict = newest_verdict(self.folder)
        if verdict != self.verdict:
            self.verdict, self.next = verdict, 0.0
        if not self.certain and time.monotonic() >= self.next:
            before, self.record = self.record, self.read(self.folder)
            self.certain = self.record.is_over and self.record.status in (DONE, before.status)
            self.next = time.monotonic() + QUERY_INTERVAL
        return self.certain


def wait_until_over(
    folder: RunFolder, tell: Callable[[Record], None] = lambda record: None
) -> Record:
    """Wait until the run is over, and return its record. `tell` gets it meanwhile, again and
    again.
    """
    monitor = RunMonitor(folder)
    while not monitor.is_over():
        tell(monitor.record)
        time.sleep(POLL_INTERVAL)
    return monitor.record


def follow(
    run_log: RunLog, monitor: RunMonitor, *, rank: int | None = None, grep: str = ""
) -> Iterator[list[LogLine]]:
    """Yield what the run prints, attempt after attempt, until it is over. An empty list means:
    nothing new for now.
    """
    pause = PAUSES[0]
    while True:
        # both checked before reading, so that the last lines are still read
        over = monitor.is_over()
        new = run_log.read_new(rank=rank, grep=grep, finish=over)
        yield new
        if new:
            pause = PAUSES[0]
        elif over:
            return
        else:
            time.sleep(pause)
            pause = min(pause * 1.1, PAUSES[1])
