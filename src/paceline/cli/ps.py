"""`paceline ps`: list runs and their status."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.cli.fitted_table import fit, print_columns
from paceline.cli.json_output import print_json
from paceline.cli.ps_columns import COLOURS, make_columns
from paceline.contract.sweep.folder import SweepFolder
from paceline.sweep.overview import SweepOverview, find_sweeps, read_sweep_overview, started_trials
from paceline.sweep.results import PENDING, find_sweep
from paceline.watch.index.rows import read_rows
from paceline.watch.overview import Overview
from paceline.watch.records import find_runs

__all__ = ["COLOURS", "command"]
Row = Overview | SweepOverview


def command(
    *,
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", help="Show the N newest.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="Show all of them.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Show only queued and running ones.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Show only those in this state, e.g. failed; repeatable."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="NAME", help="Show the trials of a sweep as rows.")
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="Show only runs of this project.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> int:
    """List the runs in this scratch folder, newest first, both here and on Slurm.

    A sweep is one row. In a narrow terminal, columns that matter less are left out, and the last line names them. A
    pipe gets all columns.
    """
    scratch = runs.scratch_here()
    selected = bool(live or state or project)
    rows: Sequence[Row]
    if sweep is not None:
        rows, older = _read_trials(sweep, scratch), 0
    else:
        rows, older = _read(scratch, None if every or selected else count)
    if selected:
        rows = [row for row in rows if _is_wanted(row, live=live, states=state, project=project)]
    if not every and not json and sweep is None:
        rows, older = rows[:count], older + len(rows[count:])
    if json:
        _print_json(scratch, rows)
        return 0
    if not rows:
        console.say_note(f"no runs in {scratch}" if not selected else f"no such runs in {scratch}")
        return 0
    _print(rows)
    if older:
        shown = "paceline ps --live" if live else "paceline ps"
        console.say_note(f"{older} older run{'s' * (older > 1)}: {shown} -n {len(rows) + older}")
    unknown = [row for row in rows if isinstance(row, Overview) and row.status == "unknown" and row.hint]
    if unknown:
        console.say_note(f"the status of {len(unknown)} of these is unknown. {unknown[0].hint}")
    return 0


def _read(scratch: Path, limit: int | None) -> tuple[list[Row], int]:
    """Return the newest runs and sweeps, and how many are older."""
    folders = {str(folder.path): folder for folder in find_runs(scratch)}
    sweeps = {str(folder.path): folder for folder in find_sweeps(scratch)}
    ages = {path: os.path.basename(path) for path in folders} | {path: _age(sweep) for path, sweep in sweeps.items()}
    newest = sorted(ages, key=ages.__getitem__, reverse=True)
    listed = newest if limit is None else newest[:limit]
    read = read_rows([folders[path] for path in listed if path in folders], scratch)
    rows: dict[str, Row] = {row.path: row for row in read}
    rows |= {path: read_sweep_overview(sweeps[path]) for path in listed if path in sweeps}
    return [rows[path] for path in listed], len(newest) - len(listed)


def _age(sweep: SweepFolder) -> str:
    """Return when a sweep began, as the ids of runs tell it."""
    try:
        began = sweep.spec.stat().st_mtime
    except OSError:
        began = 0.0
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(began))


def _read_trials(name: str, scratch: Path) -> list[Row]:
    folder = find_sweep(name, scratch)
    waiting = read_sweep_overview(folder).counts.get(PENDING, 0)
    if waiting:
        console.say_note(f"{waiting} trial{'s' * (waiting > 1)} of {folder.name} did not start yet")
    return list(read_rows(started_trials(folder), folder.path))


def _is_wanted(row: Row, *, live: bool, states: list[str] | None, project: str | None) -> bool:
    if project is not None and row.project != project:
        return False
    if live and row.is_over:
        return False
    found = {row.status, *(row.counts if isinstance(row, SweepOverview) else ())}
    return not states or not found.isdisjoint(states)


def _print(rows: Sequence[Row]) -> None:
    out = console.console()
    shown, dropped = fit(make_columns(rows), out.width)
    print_columns(out, shown, out.width)
    if dropped:
        names = ", ".join(column.title for column in dropped)
        out.print(f"not in this width: {names} (all: paceline ps | less -S)", style="dim")


def _print_json(scratch: Path, rows: Sequence[Row]) -> None:
    print_json(
        scratch=str(scratch),
        time=time.time(),
        runs=[row.to_json() for row in rows if isinstance(row, Overview)],
        sweeps=[row.to_json() for row in rows if isinstance(row, SweepOverview)],
    )
