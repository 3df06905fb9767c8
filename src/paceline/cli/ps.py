"""`paceline ps`: list runs and their status."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.cli.fitted_table import Column, fit, make_table
from paceline.spec.quantities import show_seconds
from paceline.watch.records import OVER, Record, find_runs, read_records

COLOURS = {
    "done": "good",
    "failed": "bad",
    "lost": "bad",
    "running": "name",
    "queued": "dim",
    "cancelled": "dim",
    "stopped": "warn",
}


def command(
    *,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", help="Show the N newest runs.")] = 20,
    live: Annotated[bool, typer.Option("--live", help="Show only queued and running ones.")] = False,
) -> int:
    """List the runs in this scratch folder, newest first, both here and on Slurm.

    In a narrow terminal, columns that matter less are left out, and the last line names them. A pipe gets all columns.
    """
    scratch = runs.scratch_here()
    found = find_runs(scratch)
    if live:  # a live run may be older than many finished ones
        known = [record for record in read_records(found) if not record.is_over]
        records, older = known[:count], len(known[count:])
    else:
        records, older = read_records(found[:count]), len(found[count:])
    if not records:
        console.say_note(f"no runs in {scratch}")
        return 0
    out = console.console()
    shown, dropped = fit(_columns(records), out.width)
    console.print_table(out, make_table(shown, out.width))
    if dropped:
        names = ", ".join(column.title for column in dropped)
        out.print(f"not in this width: {names} (all: paceline ps | less -S)", style="dim")
    if older:
        flags = "--live -n" if live else "-n"
        console.say_note(f"{older} older run{'s' * (older > 1)}: paceline ps {flags} {len(records) + older}")
    unknown = [record for record in records if record.no_answer is not None]
    if unknown:
        console.say_note(f"the status of {len(unknown)} of these is unknown. {unknown[0].hint}")
    return 0


def _columns(records: list[Record]) -> list[Column]:
    columns = [
        Column("RUN"), Column("STATUS"), Column("JOB", rank=1), Column("RANKS", rank=6, optional=True),
        Column("ATTEMPT", rank=7, optional=True), Column("STEP", rank=4),
        Column("AGE", rank=5, optional=True), Column("PROGRAM", rank=3, wraps_at=12, wraps_well_at=16, crops=True),
        Column("WHERE / WHY", rank=2, wraps_at=16, wraps_well_at=18),
    ]  # fmt: skip
    for record in records:
        details = record.details
        colour = COLOURS.get(record.status, "bad" if record.status in OVER else "name")
        age = time.time() - float(details.get("created") or time.time())
        cells = (
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
        for column, text in zip(columns, cells, strict=True):
            column.cells.append(text)
    return columns
