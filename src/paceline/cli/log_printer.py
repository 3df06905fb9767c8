"""Print the lines of a run: a coloured rank before each, a line where an attempt begins, progress bars as they grow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from shutil import get_terminal_size
from typing import IO

from paceline.cli import console
from paceline.contract.foreign_records import read_bounded
from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import WAITING
from paceline.watch.log_file import keep_colours
from paceline.watch.records import Record
from paceline.watch.run_log import LogLine, RunLog, RunMonitor, follow

COLOURS = [f"\033[{code}m" for code in (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)]
ERASE = "\r\033[K"


class LogPrinter:
    """Prints lines. A terminal gets their text and colours, unless `raw`; a pipe or a file gets all of it."""

    def __init__(
        self,
        folder: RunFolder,
        stream: IO[str],
        *,
        prefixes: bool = False,
        raw: bool = False,
        timestamps: bool = False,
    ) -> None:
        self._folder, self._stream = folder, stream
        self._prefixes, self._timestamps = prefixes, timestamps
        self._is_terminal = stream.isatty()
        self._filters = self._is_terminal and not raw
        self._attempt: int | None = None
        self._bar = ""  # a line without an end that is shown now

    def print(self, lines: Iterable[LogLine], *, bars: Iterable[LogLine] = ()) -> None:
        """Print lines. On a terminal, also the newest of the lines that have no end yet, until it is drawn over."""
        newest = list(bars)[-1:] if self._is_terminal else []
        bar = "".join(map(self._fit, newest))
        for line in lines:
            self._stream.write(ERASE if self._bar else "")
            self._bar = ""
            self._print(line)
        if bar != self._bar:
            self._stream.write(f"{ERASE}{bar}")
            self._bar = bar
        self._stream.flush()

    def _print(self, line: LogLine) -> None:
        if self._attempt is not None and line.attempt > self._attempt:
            self._stream.write(
                console.paint(self._describe_attempt(line.attempt), console.GREY, self._stream)
                + "\n"
            )
        self._attempt = max(line.attempt, self._attempt or 0)
        text = keep_colours(line.text) if self._filters else line.text
        if self._filters and "\033" in text:
            text += console.PLAIN  # its colour must not go on in the next line
        self._stream.write(f"{self._before(line)}{text}\n")

    def _before(self, line: LogLine) -> str:
        when = ""
        if self._timestamps:
            when = console.paint(f"{_show_time(line.time):19} ", console.GREY, self._stream)
        if not self._prefixes:
            return when
        rank = "-" if line.rank is None else str(line.rank)
        colour = console.GREY if line.rank is None else COLOURS[line.rank % len(COLOURS)]
        return when + console.paint(f"[{rank}] ", colour, self._stream)

    def _fit(self, line: LogLine) -> str:
        """Return a line without an end, cut to the width of the terminal."""
        prefix = f"[{line.rank}] " if self._prefixes and line.rank is not None else ""
        return (prefix + console.printable(line.plain).replace("\t", " "))[
            : get_terminal_size().columns - 1
        ]

    def _describe_attempt(self, number: int) -> str:
        """Return the line above an attempt's output: when it began, and from where."""
        attempt, began, start = self._folder.attempt(number), "", ""
        with suppress(OSError, ValueError):
            began = f", {_show_time(attempt.start.lstat().st_mtime)}"
            step = int(read_bounded(attempt.start, 1000).split()[-1])
            start = f", from step {step}" if step >= 0 else ", from the beginning"
        return f"--- attempt {number}{began}{start} ---"


class WaitNotes:
    """Says on stderr why a run waits, once for each reason."""

    def __init__(self) -> None:
        self._said = ""

    def update(self, record: Record) -> None:
        is_waiting = record.state is not None and record.state.phase == WAITING
        text = f"{record.folder.key} {record.status_phrase}{f' ({record.detail})' if record.detail else ''}"
        if text != self._said and (is_waiting or (self._said and not record.is_over)):
            console.say_note(text)
        self._said = text if is_waiting else ""


def has_several_logs(record: Record) -> bool:
    """Whether the output of a run comes from several processes, of which each line should name one."""
    nodes, nproc = int(record.details.get("nodes") or 1), int(record.details.get("nproc") or 1)
    launch = record.details.get("spec", {}).get("launch")
    style = record.details.get("style") or (launch.get("style") if isinstance(launch, dict) else "")
    return nodes * (1 if style == "spawn" else nproc) > 1


def _show_time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def follow_until_over(
    run_log: RunLog,
    printer: LogPrinter,
    *,
    rank: int | None,
    grep: str = "",
    lines: Iterable[LogLine] = (),
) -> Record:
    """Print lines, and what comes after them, until the run is over. While it waits, say why. Return its record."""
    monitor, notes = RunMonitor(run_log.folder), WaitNotes()
    notes.update(monitor.record)
    printer.print(lines)
    try:
        for new in follow(run_log, monitor, rank=rank, grep=grep):
            printer.print(new, bars=() if grep else run_log.unfinished(rank=rank))
            notes.update(monitor.record)
    finally:
        printer.print([])  # leaves the terminal at the beginning of a line
    return monitor.record
