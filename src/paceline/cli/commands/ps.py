"""`paceline ps`: list runs and their status."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import cluster_views, console, runs, typer_options
from paceline.cli.json_output import print_json
from paceline.cli.tables import fit, print_columns
from paceline.cli.views.newest_rows import Row, read_newest
from paceline.cli.views.ps_columns import COLOURS, Points, make_columns
from paceline.contract.typed_command import to_type
from paceline.errors import UsageError
from paceline.sweep.overview import SweepOverview, started_trials
from paceline.sweep.results import PENDING, STATES, find_sweep, read_sweep
from paceline.watch import origin
from paceline.watch.index import read_rows
from paceline.watch.overview import Overview
from paceline.watch.run_status import STATUSES

__all__ = ["COLOURS", "command"]

forwarded = cluster_views.forwarded  # with --on


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
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", metavar="NAME", help="Show the trials of a sweep as rows."),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", metavar="NAME", help="Show only runs of this project."),
    ] = None,
    json: typer_options.AsJson = False,
) -> int:
    """List the runs in this scratch folder, newest first, both here and on Slurm.

    A sweep takes one row. A narrow terminal shows fewer columns, and the last line names those left out. If that is
    still too wide, ids appear without their date; commands accept these too. Piped output has all columns and full ids.
    """
    scratch = runs.scratch_here()
    points: Points = {}
    selected = bool(live or state or project)
    rows: Sequence[Row]
    if sweep is not None:
        (rows, points), older = _read_trials(sweep, scratch), 0
    else:
        rows, older = read_newest(scratch, None if every or selected else count)
    if selected:
        _check_states(state or (), rows)
        rows = [row for row in rows if _is_wanted(row, live=live, states=state, project=project)]
    if not every and not json and sweep is None:
        rows, older = rows[:count], older + len(rows[count:])
    if json:
        _print_json(scratch, rows, points)
        return 0
    if not rows:
        _say_none(f"no {'such ' * selected}runs in {origin.place(scratch)}")
        return 0
    _print(rows, points)
    if older:
        shown = to_type(f"ps{' --live' * live} -n {len(rows) + older}")
        console.say_note(f"{older} older run{'s' * (older > 1)}: {shown}")
    unknown = [
        row for row in rows if isinstance(row, Overview) and row.status == "unknown" and row.hint
    ]
    if unknown:
        console.say_note(f"the status of {len(unknown)} of these is unknown. {unknown[0].hint}")
    return 0


def _say_none(text: str) -> None:
    from paceline.spec.clusters import suggest_clusters

    elsewhere = suggest_clusters()
    console.say_note(f"{text}. {elsewhere}" if elsewhere else text)


def _read_trials(name: str, scratch: Path) -> tuple[list[Row], Points]:
    """Return the trials of a sweep that have started, and the parameters of each."""
    found = read_sweep(find_sweep(name, scratch))
    waiting = found.counts.get(PENDING, 0)
    if waiting:
        console.say_note(
            f"{waiting} trial{'s' * (waiting > 1)} of {found.name} {'has' if waiting == 1 else 'have'} not started yet"
        )
    points = {
        str(trial.folder.path): {key: trial.point.get(key) for key in found.keys}
        for trial in found.trials
    }
    return list(read_rows(started_trials(found.folder), found.folder.path)), points


def _check_states(wanted: Iterable[str], rows: Iterable[Row]) -> None:
    """Raise UsageError for a state that does not exist. Slurm may have more than we know: those of rows count too."""
    known = sorted({*STATUSES, *STATES, *(row.status for row in rows)})
    for state in wanted:
        if state not in known:
            close = difflib.get_close_matches(state.lower(), known, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise UsageError(
                f"Unknown --state {state!r}.",
                hint=f"{hint}The states are: {', '.join(map(repr, known))}.",
            )


def _is_wanted(row: Row, *, live: bool, states: list[str] | None, project: str | None) -> bool:
    if project is not None and row.project != project:
        return False
    if live and row.is_over:
        return False
    found = {row.status, *(row.counts if isinstance(row, SweepOverview) else ())}
    return not states or not found.isdisjoint(states)


def _print(rows: Sequence[Row], points: Points) -> None:
    out = console.console()
    shown, dropped = fit(make_columns(rows, points), out.width)
    if not all(column.optional for column in dropped):
        shown, dropped = fit(make_columns(rows, points, short_ids=True), out.width)
    print_columns(out, shown, out.width)
    if dropped:
        names = ", ".join(column.title for column in dropped)
        out.print(f"hidden columns: {names} (show all: {to_type('ps')} | less -S)", style="dim")


def _print_json(scratch: Path, rows: Sequence[Row], points: Points) -> None:
    print_json(
        scratch=str(scratch),
        time=origin.now(),
        runs=[_row_json(row, points) for row in rows if isinstance(row, Overview)],
        sweeps=[row.to_json() for row in rows if isinstance(row, SweepOverview)],
    )


def _row_json(row: Overview, points: Points) -> dict[str, Any]:
    return {**row.to_json(), "point": points[row.path]} if row.path in points else row.to_json()
