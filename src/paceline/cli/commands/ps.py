"""`paceline ps`: list runs and their status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, runs, typer_options
from paceline.cli.console import Column, fit, print_columns
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import UsageError
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import to_type
from paceline.sweep.report import SweepOverview, read_sweep_overview
from paceline.sweep.results import STATES
from paceline.ui.terminal.rows import cells
from paceline.watch import origin
from paceline.watch.overview import Overview, read_rows
from paceline.watch.records import newest_first
from paceline.watch.run_status import OVER, STATUSES

Row = Overview | SweepOverview

COLOURS = {
    "done": "good",
    "failed": "bad",
    "lost": "bad",
    "missing": "bad",
    "running": "name",
    "queued": "dim",
    "cancelled": "dim",
    "stopped": "warn",
}


def command(
    *,
    count: Annotated[
        int, typer.Option("-n", "--count", metavar="N", min=1, help="Show the N newest.")
    ] = 20,
    every: Annotated[bool, typer.Option("--all", help="Show all of them.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show only queued and running ones.")
    ] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Show only those in this state, e.g. failed; repeatable.",
        ),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", metavar="NAME", help="Show only runs of this project."),
    ] = None,
    json: typer_options.AsJson = False,
) -> int:
    """List the runs in this scratch folder, newest first, both here and on Slurm.

    A sweep takes one row. A narrow terminal shows fewer columns, and the last line names those left out. Piped output
    has all columns.
    """
    scratch = runs.scratch_here()
    selected = bool(live or state or project)
    rows, older = read_newest(scratch, None if every or selected else count)
    if selected:
        _check_states(state or (), rows)
        rows = [row for row in rows if _is_wanted(row, live=live, states=state, project=project)]
    if not every and not json:
        rows, older = rows[:count], older + len(rows[count:])
    if json:
        console.print_json(
            scratch=str(scratch),
            time=origin.now(),
            runs=[row.to_json() for row in rows if isinstance(row, Overview)],
            sweeps=[row.to_json() for row in rows if isinstance(row, SweepOverview)],
        )
        return 0
    if not rows:
        console.say_note(f"no {'such ' * selected}runs in {origin.place(scratch)}")
        return 0
    _print(rows)
    if older:
        shown = to_type(f"ps{' --live' * live} -n {len(rows) + older}")
        console.say_note(f"{older} older run{'s' * (older > 1)}: {shown}")
    unknown = [
        row for row in rows if isinstance(row, Overview) and row.status == "unknown" and row.hint
    ]
    if unknown:
        console.say_note(f"the status of {len(unknown)} of these is unknown. {unknown[0].hint}")
    return 0


def _check_states(wanted: Iterable[str], rows: Iterable[Row]) -> None:
    """Raise UsageError for a state that does not exist. Slurm may have more than we know: those of rows count too."""
    known = sorted({*STATUSES, *STATES, *(row.status for row in rows)})
    for state in {*wanted} - {*known}:
        raise UsageError(
            f"Unknown --state {state!r}.", hint=f"The states are: {', '.join(map(repr, known))}."
        )


def _is_wanted(row: Row, *, live: bool, states: list[str] | None, project: str | None) -> bool:
    found = {row.status, *(row.counts if isinstance(row, SweepOverview) else ())}
    is_of_project = project is None or row.project == project
    has_state = not states or not found.isdisjoint(states)
    return is_of_project and has_state and not (live and row.is_over)


def _print(rows: Sequence[Row]) -> None:
    out = console.console()
    shown, dropped = fit(make_columns(rows), out.width)
    print_columns(out, shown)
    if dropped:
        names = ", ".join(column.title for column in dropped)
        out.print(f"hidden columns: {names} (show all: {to_type('ps')} | less -S)", style="dim")


def read_newest(scratch: Path, limit: int | None) -> tuple[list[Row], int]:
    """Return the newest runs and sweeps, and how many are older."""
    newest = newest_first(scratch)
    listed = newest[:limit]
    sweeps = {path: SweepFolder(Path(path)) for path in listed}
    sweeps = {path: sweep for path, sweep in sweeps.items() if sweep.spec.exists()}
    read = read_rows(RunFolder(Path(path)) for path in listed if path not in sweeps)
    rows: dict[str, Row] = {row.path: row for row in read}
    rows |= {path: read_sweep_overview(sweep) for path, sweep in sweeps.items()}
    return [rows[path] for path in listed], len(newest) - len(listed)


def make_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of these rows."""
    columns = [
        Column("RUN"),
        Column("STATUS"),
        Column("JOB", rank=6),
        Column("RANKS", rank=10),
        Column("ATTEMPT", rank=11),
        Column("STEP", rank=2),
        Column("LEFT", rank=3),
        Column("LOSS", rank=4),
        Column("RATE", rank=8),
        Column("GOODPUT", rank=9),
        Column("AGE", rank=7),
        Column("PROGRAM", rank=5, wraps_at=12),
        Column("WHERE / WHY", rank=1, wraps_at=20),
    ]
    for row in rows:
        found = _sweep_cells(row) if isinstance(row, SweepOverview) else cells(row)
        shown = {
            **{name: console.cell(text) for name, text in found.items()},
            "STATUS": _status(row),
        }
        for column in columns:
            column.cells.append(shown.get(column.title, ""))
    return columns


def _sweep_cells(row: SweepOverview) -> dict[str, str]:
    ended = sum(count for state, count in row.counts.items() if state not in ("running", "pending"))
    text = ", ".join(f"{count} {state}" for state, count in row.counts.items())
    if row.best is not None:
        text += f"; best {row.metric} {row.best:.4g} ({row.name}-{row.best_trial})"
    now = origin.now()
    return {
        "RUN": row.name,
        "STEP": f"{ended}/{row.trials}",
        "AGE": show_seconds(max(0.0, now - (row.created or now))),
        "PROGRAM": f"{row.trials} trial{'s' * (row.trials != 1)}",
        "WHERE / WHY": text,
    }


def _status(row: Row) -> str:
    """Return the status; without a connection to the cluster of a run that was not over, how long ago it had it."""
    colour = COLOURS.get(row.status, "bad" if row.status in OVER else "name")
    ago = f" {show_seconds(age)} ago" if not row.is_over and (age := origin.age()) else ""
    return f"[{colour}]{console.cell(row.status)}{ago}[/]"
