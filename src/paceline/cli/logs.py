"""`paceline logs`: print the output of a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import FAILED
from paceline.errors import UsageError
from paceline.watch.logs.monitor import RunMonitor, find_log
from paceline.watch.logs.monitor import follow as stream
from paceline.watch.records import newest_verdict, read_record


def command(
    run: runs.Run = "last",
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run is over.")] = False,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Print the output of this rank.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Attempt (default: the newest).")
    ] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Print the output of the batch script and Slurm.")] = False,
) -> int:
    """Print the output of one rank of a run.

    \b
      paceline logs               rank 0 of the newest run
      paceline logs -f 1a2b       follow a run through restarts and requeues until it is over
      paceline logs --rank 3 1a2b
      paceline logs --batch 1a2b  the batch script and Slurm
    """
    folder = runs.named(run)
    output = console.ScriptOutput(sys.stdout)
    if follow:
        with runs.goes_on(folder):
            for text in stream(folder, rank=rank, monitor=RunMonitor(folder)):
                output.write(text)
                sys.stdout.flush()
        _say_failure(folder)
        return 0
    path = folder.slurm_log if batch else find_log(folder, rank=rank, attempt=attempt)
    if path is None or not path.exists():
        raise _no_log(folder, rank=rank, attempt=attempt, batch=batch)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            output.write(line)
    sys.stdout.flush()
    if attempt is None and not batch:
        _say_failure(folder)
    return 0


def _no_log(folder: RunFolder, *, rank: int, attempt: int | None, batch: bool) -> UsageError:
    """Return the error for a log that does not exist: what there is instead."""
    record, run = read_record(folder), folder.path.name
    attempts = [each.number for each in folder.attempts()]
    status = f"the run is {record.status}{f' ({record.detail})' if record.detail else ''}"
    if batch:
        hint = "Only runs of Slurm have one." if record.job is None else f"Wait for it with `paceline logs -f {run}`."
        return UsageError(f"There is no log of a batch script in {folder.path}; {status}.", hint=hint)
    if attempts and attempt is not None and attempt not in attempts:
        return UsageError(
            f"Run {run} has no attempt {attempt}.", hint=f"Its attempts: {', '.join(map(str, attempts))}."
        )
    ranks = int(record.details.get("nodes") or 1) * int(record.details.get("nproc") or 1)
    if rank >= ranks:
        return UsageError(f"Run {run} has no rank {rank}.", hint=f"It has {ranks} ranks, from 0.")
    if not record.is_over:
        hint = f"Wait for it with `paceline logs -f {run}`."
    elif folder.slurm_log.exists():
        hint = f"Its ranks did not start. Read the output of the batch script: paceline logs --batch {run}"
    else:
        hint = f"Its ranks did not start. See `paceline show {run}`."
    when = "" if record.is_over else " yet"
    return UsageError(f"There is no log of rank {rank}{when}; {status}.", hint=hint)


def _say_failure(folder: RunFolder) -> None:
    """Say who failed first: it may be another rank than the one whose log is printed."""
    if newest_verdict(folder) == FAILED:
        runs.say_failure(folder)
