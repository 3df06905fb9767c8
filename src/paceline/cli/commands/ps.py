"""`paceline ps`: list runs and their status."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from paceline.cli import cluster_views, console, runs, typer_options
from paceline.cli.console import print_json
from paceline.cli.tables import Column, fit, print_columns
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import SweepFolder
from paceline.errors import UsageError
from paceline.spec.quantities import brief_seconds, show_seconds
from paceline.spec.run_path import list_runs_and_sweeps
from paceline.spec.shell_text import to_type
from paceline.sweep.overview import SweepOverview, read_sweep_overview, started_trials
from paceline.sweep.results import PENDING, STATES, find_sweep, read_sweep
from paceline.sweep.rows import to_label
from paceline.watch import origin
from paceline.watch.latest import short_number
from paceline.watch.overview import Overview, read_rows
from paceline.watch.run_status import OVER, STATUSES

forwarded = cluster_views.forwarded  # with --on


Row = Overview | SweepOverview
Points = Mapping[str, Mapping[str, Any]]  # the path of each trial -> its parameters


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
        print_json(
            scratch=str(scratch),
            time=origin.now(),
            runs=[_row_json(row, points) for row in rows if isinstance(row, Overview)],
            sweeps=[row.to_json() for row in rows if isinstance(row, SweepOverview)],
        )
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
    return list(read_rows(started_trials(found.folder))), points


def _check_states(wanted: Iterable[str], rows: Iterable[Row]) -> None:
    """Raise UsageError for a state that does not exist. Slurm may have more than we know: those of rows count too."""
    known = sorted({*STATUSES, *STATES, *(row.status for row in rows)})
    for state in {*wanted} - {*known}:
        raise UsageError(
            f"Unknown --state {state!r}.", hint=f"The states are: {', '.join(map(repr, known))}."
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


def _row_json(row: Overview, points: Points) -> dict[str, Any]:
    return {**row.to_json(), "point": points[row.path]} if row.path in points else row.to_json()


def read_newest(scratch: Path, limit: int | None) -> tuple[list[Row], int]:
    """Return the newest runs and sweeps, and how many are older."""
    found, sweep_paths = list_runs_and_sweeps(scratch)
    folders = {path: path.rpartition("/")[2] for path in found}
    sweeps = {path: SweepFolder(Path(path)) for path in sweep_paths}
    ages = folders | {path: _began(sweep) for path, sweep in sweeps.items()}
    newest = sorted(ages, key=ages.__getitem__, reverse=True)
    listed = newest if limit is None else newest[:limit]
    read = read_rows(RunFolder(Path(path)) for path in listed if path in folders)
    rows: dict[str, Row] = {row.path: row for row in read}
    rows |= {path: read_sweep_overview(sweeps[path]) for path in listed if path in sweeps}
    return [rows[path] for path in listed], len(newest) - len(listed)


def _began(sweep: SweepFolder) -> str:
    """Return when a sweep began, as the ids of runs tell it."""
    try:
        began = sweep.spec.stat().st_mtime
    except OSError:
        began = 0.0
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(began))


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

NO_POINTS: Points = MappingProxyType({})
_RUN_ID = re.compile(r"\d{8}-(\d{6}-\w+)", re.ASCII)


def make_columns(
    rows: Sequence[Overview | SweepOverview], points: Points = NO_POINTS, *, short_ids: bool = False
) -> list[Column]:
    """Return the columns of these rows. Trials of one sweep have columns of their parameters instead of the program.

    Short ids leave out the date; commands accept them too.
    """
    columns = [
        Column("RUN"),
        Column("STATUS"),
        Column("JOB", rank=6, optional=True),
        Column("RANKS", rank=10, optional=True),
        Column("ATTEMPT", rank=11, optional=True),
        Column("STEP", rank=2),
        Column("LEFT", rank=3),
        Column("LOSS", rank=4),
        Column("RATE", rank=8, optional=True),
        Column("GOODPUT", rank=9, optional=True),
        Column("AGE", rank=7, optional=True),
        *(
            _parameter_columns(rows, points)
            or [Column("PROGRAM", rank=1, wraps_at=8, wraps_well_at=16, crops=True)]
        ),
        Column("WHERE / WHY", rank=5, wraps_at=16, wraps_well_at=18),
    ]
    # the same for all: an older run is older, whenever each was last heard of
    now = origin.now()
    for row in rows:
        cells = (
            _sweep_cells(row, now)
            if isinstance(row, SweepOverview)
            else _run_cells(row, points, now)
        )
        for column, text in zip(columns, cells, strict=True):
            column.cells.append(text)
    if short_ids:
        columns[0].cells[:] = _shorten(columns[0].cells)
    return columns


def _shorten(ids: Sequence[str]) -> list[str]:
    """Return ids of runs without the date, if that leaves them different."""
    short = [found[1] if (found := _RUN_ID.fullmatch(each)) else each for each in ids]
    return short if len({*short}) == len({*ids}) else list(ids)


def _parameter_columns(rows: Sequence[Overview | SweepOverview], points: Points) -> list[Column]:
    """Return a column for each parameter. In a narrow terminal, those that are the same everywhere drop out first."""
    listed = [points[row.path] for row in rows if row.path in points]
    columns = []
    for key in dict.fromkeys(key for point in points.values() for key in point):
        varies = len({str(point.get(key)) for point in listed}) > 1
        columns.append(
            Column(
                console.cell(key),
                rank=5 if varies else 12,
                wraps_at=8,
                crops=True,
                optional=not varies,
            )
        )
    return columns


def _run_cells(row: Overview, points: Points, now: float) -> tuple[str, ...]:
    return (
        console.cell(row.key),
        _status(row),
        row.job,
        f"{row.nodes} x {row.nproc}",
        str(row.attempts or ""),
        _step(row),
        "" if row.seconds_left is None else show_seconds(row.seconds_left),
        "" if row.loss is None else f"{row.loss:.4g}",
        "" if row.rate is None or row.is_over else f"{short_number(row.rate)} {row.rate_unit}",
        "" if row.goodput is None else f"{row.goodput:.0%}",
        _age(row.created, now),
        *(
            [_value(each) for each in points[row.path].values()]
            if points
            else [console.cell(row.name or row.program)]
        ),
        console.cell(row.detail),
    )


def _sweep_cells(row: SweepOverview, now: float) -> tuple[str, ...]:
    ended = sum(count for state, count in row.counts.items() if state not in ("running", "pending"))
    counts = ", ".join(f"{count} {state}" for state, count in row.counts.items())
    best = (
        ""
        if row.best is None
        else f"; best {row.metric} {row.best:.4g} ({row.name}-{row.best_trial})"
    )
    return (
        console.cell(row.name),
        _status(row),
        "",
        "",
        "",
        f"{ended}/{row.trials}",
        "",
        "",
        "",
        "",
        _age(row.created, now),
        f"{row.trials} trial{'s' * (row.trials != 1)}",
        console.cell(f"{counts}{best}"),
    )


def _value(value: object) -> str:
    return "" if value is None else console.cell(to_label(value))


def _status(row: Overview | SweepOverview) -> str:
    """Return the status; without a connection to the cluster of a run that was not over, how long ago it had it."""
    colour = COLOURS.get(row.status, "bad" if row.status in OVER else "name")
    ago = f" {brief_seconds(age)} ago" if not row.is_over and (age := origin.age()) else ""
    return f"[{colour}]{console.cell(row.status)}{ago}[/]"


def _step(row: Overview) -> str:
    if row.step is None:
        return ""
    return str(row.step) if row.total_steps is None else f"{row.step}/{row.total_steps}"


def _age(created: float | None, now: float) -> str:
    return show_seconds(max(0.0, now - (created or now)))
