"""`paceline logs`: print the output of a run."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Annotated

import typer

from paceline.cli import runs
from paceline.cli.log_printer import LogPrinter, follow_until_over, has_several_logs
from paceline.contract.verdict import FAILED
from paceline.errors import UsageError
from paceline.spec.quantities import parse_seconds
from paceline.spec.shell_text import to_type
from paceline.watch.log_file import LogFile
from paceline.watch.records import Record, read_record
from paceline.watch.run_follower import POLL_INTERVAL, RunMonitor
from paceline.watch.run_log import Filter, LogLine, RunLog
from paceline.watch.run_status import newest_verdict

ALL = "all"


def command(
    run: runs.Run = "last",
    *,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing until the run is over.")
    ] = False,
    rank: Annotated[
        str, typer.Option("--rank", metavar="N|all", help="Print the output of this rank.")
    ] = ALL,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Print this attempt only.")
    ] = None,
    grep: Annotated[
        str, typer.Option("--grep", metavar="TEXT", help="Print the lines that contain this text.")
    ] = "",
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Print only lines from the last TIME, e.g. 10m or 2h30m.",
        ),
    ] = "",
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Print the last N lines.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Print the time of each line.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Keep escape sequences and every update of progress bars.")
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="Print the output of the batch script and Slurm.")
    ] = False,
) -> int:
    """Print the output of all ranks and attempts of a run, sorted by time, with the rank before each line.

    \b
      paceline logs                        all output of the newest run
      paceline logs -f 1a2b                follow a run through restarts and requeues until it is over
      paceline logs -f --tail 20 1a2b      the same, from the last 20 lines on
      paceline logs --rank 3 --since 10m 1a2b
      paceline logs --grep loss --attempt 2 1a2b
      paceline logs --batch 1a2b           the batch script and Slurm
    """
    chosen = Filter(_parse_rank(rank), grep, _parse_since(since))
    if follow and attempt is not None:
        raise UsageError(
            "-f cannot be combined with --attempt: it follows the newest attempt.",
            hint="Use only one of them.",
        )
    if batch and (chosen != Filter() or attempt is not None or timestamps):
        raise UsageError(
            "--batch prints the output of the batch script, which has no ranks, attempts or times.",
            hint="Combine it with -f, --tail or --raw alone.",
        )
    record = read_record(runs.named(run))
    folder = record.folder
    if batch:
        _print_batch(record, tail=tail, follow=follow, raw=raw)
        return 0
    _require_logs(record, chosen.rank, attempt, follow=follow)
    prefixes = chosen.rank is None and has_several_logs(record)
    printer = LogPrinter(folder, sys.stdout, prefixes=prefixes, raw=raw, timestamps=timestamps)
    run_log = RunLog(folder, keeps_states=raw)
    lines: Iterable[LogLine]
    if tail is None:
        lines = run_log.lines(
            rank=chosen.rank, attempt=attempt, grep=grep, since=chosen.since, complete=follow
        )
    else:
        lines = run_log.tail(
            tail, rank=chosen.rank, attempt=attempt, grep=grep, since=chosen.since, complete=follow
        )
    if follow:
        with runs.goes_on(folder):
            follow_until_over(run_log, printer, rank=chosen.rank, grep=grep, lines=lines)
    else:
        printer.print(lines)
    # Another rank may have failed than the one printed here. Who asks for some lines of the log
    # gets these alone.
    is_part = attempt is not None or (not follow and bool(tail is not None or grep or since))
    if not is_part and newest_verdict(folder) == FAILED:
        runs.say_failure(folder)
    return 0


def _print_batch(record: Record, *, tail: int | None, follow: bool, raw: bool) -> None:
    """Print the output of the batch script, which belongs to no attempt."""
    folder = record.folder
    file = LogFile(folder.slurm_log, keeps_states=raw)
    if not file.path.exists() and not (follow and record.job is not None):
        wait = f"Wait for it with `{to_type(f'logs -f --batch {folder.key}')}`."
        hint = "Only runs of Slurm have one." if record.job is None else wait
        raise UsageError(
            f"There is no batch script log in {folder.path}; {_status(record)}.", hint=hint
        )
    printer = LogPrinter(folder, sys.stdout, raw=raw)
    if tail is not None:
        pieces = itertools.chain(file.lines(file.size()), () if follow else file.finish())
        printer.print(_batch_line(content) for _, content in deque(pieces, maxlen=tail))
    monitor = RunMonitor(folder) if follow else None
    with runs.goes_on(folder):
        while True:
            over = monitor is None or monitor.is_over()
            printer.print(_batch_line(content) for _, content in file.lines(file.size()))
            if over:
                break
            time.sleep(POLL_INTERVAL)
    printer.print(_batch_line(content) for _, content in file.finish())


def _batch_line(content: bytes) -> LogLine:
    return LogLine(None, None, 0, content.decode("utf-8", "replace"))


def _parse_rank(text: str) -> int | None:
    if text.lower() == ALL:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise UsageError(f'Invalid --rank "{text}": use the number of a rank, or all.')
    return int(text)


def _parse_since(text: str) -> float | None:
    try:
        return time.time() - parse_seconds(text) if text else None
    except ValueError as expected:
        raise UsageError(f'Invalid --since "{text}": use {expected}.') from None


def _status(record: Record) -> str:
    return f"the run {record.status_phrase}{f' ({record.detail})' if record.detail else ''}"


def _require_logs(record: Record, rank: int | None, attempt: int | None, *, follow: bool) -> None:
    """Raise an error for output that does not exist, which says what there is instead."""
    folder, run = record.folder, record.folder.key
    attempts = [each for each in folder.attempts() if attempt in (None, each.number)]
    names = [path.name for each in attempts for path in each.path.glob("*.log")]
    wanted = [name for name in names if rank is None or name.startswith((f"rank-{rank}.", "node-"))]
    if not wanted and (known := folder.attempt_numbers()) and attempt not in (None, *known):
        raise UsageError(
            f"Run {run} has no attempt {attempt}.",
            hint=f"Its attempts: {', '.join(map(str, known))}.",
        )
    ranks = int(record.details.get("nodes") or 1) * int(record.details.get("nproc") or 1)
    if rank is not None and rank >= ranks:
        has = "1 rank, rank 0" if ranks == 1 else f"{ranks} ranks, from 0"
        raise UsageError(f"Run {run} has no rank {rank}.", hint=f"It has {has}.")
    if wanted or follow:
        return
    hint = f"Wait for it with `{to_type(f'logs -f {run}')}`."
    if record.is_over:
        see = f"See `{to_type(f'show {run}')}`."
        if folder.slurm_log.exists():
            see = f"Read the output of the batch script: {to_type(f'logs --batch {run}')}"
        hint = f"Its ranks did not start. {see}"
    what = "output" if rank is None else f"log of rank {rank}"
    yet = "" if record.is_over else " yet"
    raise UsageError(f"There is no {what}{yet}; {_status(record)}.", hint=hint)
