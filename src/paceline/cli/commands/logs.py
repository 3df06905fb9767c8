"""`paceline logs`: print the output of a run."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from paceline.cli import console, runs
from paceline.cli.log_printer import LogPrinter, follow_until_over, has_several_logs
from paceline.contract.foreign_records import read_tail
from paceline.contract.verdict import FAILED
from paceline.errors import UsageError
from paceline.spec.quantities import parse_seconds
from paceline.spec.shell_text import to_type
from paceline.watch.records import Record, read_record
from paceline.watch.run_log import LogLine, RunLog
from paceline.watch.run_status import newest_verdict

ALL = "all"
BATCH_LOG = 1 << 20  # bytes of it that are printed


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
) -> int:
    """Print the output of all ranks and attempts of a run, sorted by time, with the rank before each line.

    If its ranks did not start, print the output of the batch script.

    \b
      paceline logs                        all output of the newest run
      paceline logs -f 1a2b                follow a run through restarts and requeues until it is over
      paceline logs -f --tail 20 1a2b      the same, from the last 20 lines on
      paceline logs --rank 3 --since 10m 1a2b
      paceline logs --grep loss --attempt 2 1a2b
    """
    if follow and attempt is not None:
        raise UsageError(
            "-f cannot be combined with --attempt: it follows the newest attempt.",
            hint="Use only one of them.",
        )
    number, begin = _parse_rank(rank), _parse_since(since)
    record = read_record(runs.named(run))
    folder = record.folder
    printer = LogPrinter(
        folder,
        sys.stdout,
        prefixes=number is None and has_several_logs(record),
        raw=raw,
        timestamps=timestamps,
    )
    if not _has_logs(record, number, attempt) and not follow:
        _print_batch_log(record, LogPrinter(folder, sys.stdout, raw=raw), number)
        return 0
    run_log = RunLog(folder, keeps_states=raw)
    wanted: dict[str, Any] = {
        "rank": number,
        "attempt": attempt,
        "grep": grep,
        "since": begin,
        "complete": follow,
    }
    lines = run_log.lines(**wanted) if tail is None else run_log.tail(tail, **wanted)
    if follow:
        with runs.goes_on(folder):
            follow_until_over(run_log, printer, rank=number, grep=grep, lines=lines)
    else:
        printer.print(lines)
    # Another rank may have failed than the one printed here. Who asks for some lines of the log
    # gets these alone.
    is_part = attempt is not None or (not follow and bool(tail is not None or grep or since))
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
