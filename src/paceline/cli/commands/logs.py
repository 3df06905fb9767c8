"""`paceline logs`: print the output of a run: a coloured rank before each line, a line where an attempt begins,
progress bars as they grow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import IO, Annotated, Any

import typer

from paceline.cli import console, runs
from paceline.contract.foreign_records import read_tail
from paceline.contract.run_folder import FAILED
from paceline.errors import UsageError
from paceline.slurm.job_states import WAITING
from paceline.spec.shell_text import to_type
from paceline.watch.log_file import keep_colours
from paceline.watch.records import Record, read_record
from paceline.watch.run_log import LogLine, RunLog, RunMonitor, follow
from paceline.watch.run_status import newest_verdict

BATCH_LOG = 1 << 20  # bytes of it that are printed
COLOURS = [f"\033[{code}m" for code in (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)]
ERASE = "\r\033[K"


def command(
    run: runs.Run = "last",
    *,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing until the run is over.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="N", min=0, help="Print the output of this rank."),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Print this attempt only.")
    ] = None,
    grep: Annotated[
        str, typer.Option("--grep", metavar="TEXT", help="Print the lines that contain this text.")
    ] = "",
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Print the last N lines.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Print the time of each line.")
    ] = False,
) -> int:
    """Print the output of all ranks and attempts of a run, sorted by time, with the rank before each line.

    If its ranks did not start, print the output of the batch script.

    \b
      paceline logs                        all output of the newest run
      paceline logs -f 1a2b                follow a run through restarts and requeues until it is over
      paceline logs -f --tail 20 1a2b      the same, from the last 20 lines on
      paceline logs --rank 3 --tail 100 1a2b
      paceline logs --grep loss --attempt 2 1a2b
    """
    if follow and attempt is not None:
        raise UsageError(
            "-f cannot be combined with --attempt: it follows the newest attempt.",
            hint="Use only one of them.",
        )
    record = read_record(runs.named(run))
    folder = record.folder
    printer = LogPrinter(
        sys.stdout, prefixes=rank is None and has_several_logs(record), timestamps=timestamps
    )
    if not _has_logs(record, rank, attempt) and not follow:
        _print_batch_log(record, LogPrinter(sys.stdout), rank)
        return 0
    run_log = RunLog(folder)
    wanted: dict[str, Any] = {"rank": rank, "attempt": attempt, "grep": grep, "complete": follow}
    lines = run_log.lines(**wanted) if tail is None else run_log.tail(tail, **wanted)
    if follow:
        with runs.goes_on(folder):
            follow_until_over(run_log, printer, rank=rank, grep=grep, lines=lines)
    else:
        printer.print(lines)
    # Another rank may have failed than the one printed here. Who asks for some lines of the log
    # gets these alone.
    is_part = attempt is not None or (not follow and bool(tail is not None or grep))
    if not is_part and newest_verdict(folder) == FAILED:
        runs.say_failure(folder)
    return 0


def _has_logs(record: Record, rank: int | None, attempt: int | None) -> bool:
    """Return whether there is output. Raises UsageError for an attempt or a rank that the run does not have."""
    folder = record.folder
    known = [each.number for each in folder.attempts()]
    if known and attempt not in (None, *known):
        raise UsageError(
            f"Run {folder.key} has no attempt {attempt}.",
            hint=f"Its attempts: {', '.join(map(str, known))}.",
        )
    ranks = int(record.details.get("nodes") or 1) * int(record.details.get("nproc") or 1)
    if rank is not None and rank >= ranks:
        raise UsageError(f"Run {folder.key} has no rank {rank}.", hint=f"Its last is {ranks - 1}.")
    attempts = [each for each in folder.attempts() if attempt in (None, each.number)]
    names = [path.name for each in attempts for path in each.path.glob("*.log")]
    return any(rank is None or name.startswith((f"rank-{rank}.", "node-")) for name in names)


def _print_batch_log(record: Record, printer: LogPrinter, rank: int | None) -> None:
    """Print the output of the batch script, for a run whose ranks did not start. Raises UsageError without any."""
    run, log = record.folder.key, record.folder.slurm_log
    if rank is None and log.exists():
        console.say_note("no rank has started; this is the output of the batch script")
        text = read_tail(log, BATCH_LOG).decode("utf-8", "replace")
        printer.print(LogLine(None, None, 0, line) for line in text.splitlines())
        return
    what = "output" if rank is None else f"log of rank {rank}"
    yet, verb = ("", "show") if record.is_over else (" yet", "logs -f")
    why = f" ({record.detail})" if record.detail else ""
    raise UsageError(
        f"There is no {what}{yet}; the run {record.status_phrase}{why}.",
        hint=f"See `{to_type(f'{verb} {run}')}`.",
    )


# -- how lines are printed ------------------------------------------------------------------------


class LogPrinter:
    """Prints lines. A terminal gets their text and colours; a pipe or a file gets all of it."""

    def __init__(
        self, stream: IO[str], *, prefixes: bool = False, timestamps: bool = False
    ) -> None:
        self._stream = stream
        self._prefixes, self._timestamps = prefixes, timestamps
        self._is_terminal = stream.isatty()
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
            head = f"--- attempt {line.attempt} ---"
            self._stream.write(f"{console.paint(head, console.GREY, self._stream)}\n")
        self._attempt = max(line.attempt, self._attempt or 0)
        text = keep_colours(line.text) if self._is_terminal else line.text
        if self._is_terminal and "\033" in text:
            text += console.PLAIN  # its colour must not go on in the next line
        self._stream.write(f"{self._before(line)}{text}\n")

    def _before(self, line: LogLine) -> str:
        when = ""
        if self._timestamps:
            moment = time.localtime(line.time)
            known = "" if line.time is None else time.strftime("%Y-%m-%d %H:%M:%S", moment)
            when = console.paint(f"{known:19} ", console.GREY, self._stream)
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
