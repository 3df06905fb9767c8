"""`paceline ps`: list runs and their status."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.spec.quantities import show_seconds
from paceline.watch.records import OVER, Record, find_runs, read_records

COLOURS = {"done": "good", "failed": "bad", "lost": "bad", "running": "name", "queued": "dim", "cancelled": "dim"}


def command(
    *,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", help="Show the N newest runs.")] = 20,
    live: Annotated[bool, typer.Option("--live", help="Show only queued and running ones.")] = False,
) -> int:
    """List the runs in this scratch folder, newest first, both here and on Slurm."""
    scratch = runs.scratch_here()
    if live:  # a live run may be older than many finished ones
        records = [record for record in read_records(find_runs(scratch)) if not record.is_over][:count]
    else:
        records = read_records(find_runs(scratch, limit=count))
    if not records:
        console.say_note(f"no runs in {scratch}")
        return 0
    console.console().print(_table(records))
    return 0


def _table(records: list[Record]) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("RUN", "STATUS", "JOB", "RANKS", "ATTEMPT", "STEP", "AGE", "PROGRAM", "WHERE / WHY"):
        table.add_column(name, no_wrap=name in ("RUN", "STATUS", "JOB"))
    for record in records:
        details = record.details
        colour = COLOURS.get(record.status, "bad" if record.status in OVER else "name")
        age = time.time() - float(details.get("created") or time.time())
        table.add_row(
            console.cell(record.run_id),
            f"[{colour}]{console.cell(record.status)}[/]",
            console.cell(record.job or ""),
            console.cell(f"{details.get('nodes', '?')} x {details.get('nproc', '?')}"),
            str(record.attempts or ""),
            "" if record.step is None else str(record.step),
            show_seconds(age),
            console.cell(details.get("name") or details.get("program", "")),
            console.cell(record.detail),
        )
    return table
