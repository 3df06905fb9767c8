"""The columns of `paceline ps`, by how much they matter in a narrow terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from paceline.cli import console
from paceline.cli.tables import Column
from paceline.spec.quantities import brief_seconds, show_seconds
from paceline.sweep.overview import SweepOverview
from paceline.sweep.rows import to_label
from paceline.watch import origin
from paceline.watch.latest import short_number
from paceline.watch.overview import Overview
from paceline.watch.run_status import OVER

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

Points = Mapping[str, Mapping[str, Any]]  # the path of each trial -> its parameters
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
