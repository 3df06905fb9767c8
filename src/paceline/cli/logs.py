"""`paceline logs`: what a run prints."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.cli import runs
from paceline.errors import UsageError
from paceline.watch.logs import RunMonitor, find_log
from paceline.watch.logs import follow as stream
from paceline.watch.records import read_record


def command(
    run: runs.Run = "last",
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run is over.")] = False,
    rank: Annotated[int, typer.Option("--rank", help="Whose lines.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", help="Of which attempt; else the newest.")
    ] = None,
    batch: Annotated[bool, typer.Option("--batch", help="What the batch script and Slurm print.")] = False,
) -> int:
    """What a rank of a run has printed, of the newest attempt.

    \b
    paceline logs               rank 0 of the newest run
    paceline logs -f 1a2b       follow a run, over relaunches and requeues, until it is over
    paceline logs --rank 3 1a2b
    paceline logs --batch 1a2b  Slurm's own words
    """
    folder = runs.named(run)
    if follow:
        for text in stream(folder, rank=rank, monitor=RunMonitor(folder)):
            sys.stdout.write(text)
            sys.stdout.flush()
        return 0
    path = folder.slurm_log if batch else find_log(folder, rank=rank, attempt=attempt)
    if path is None or not path.exists():
        raise UsageError(
            f"{folder.path.name} has no such log yet: it is {read_record(folder).status}",
            hint=f"look into {folder.path}, or wait for it: paceline logs -f {folder.path.name}",
        )
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            sys.stdout.write(line)
    return 0
