"""`paceline metrics`: a run's numbers for a monitoring system."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, runs
from paceline.contract.output_file import write_output
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem, UsageError
from paceline.spec.quantities import parse_wait
from paceline.watch.details import read_details
from paceline.watch.index import read_rows
from paceline.watch.openmetrics import read_last_values, write_openmetrics
from paceline.watch.records import Record, find_runs, read_records

MIN_INTERVAL = 10.0  # seconds

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Run ids, names, job ids, folders, or `last`, the default."),
]


def command(
    names: Names = None,
    *,
    active: Annotated[
        bool, typer.Option("--active", help="Include all your queued and running runs.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Write to this file; it is never half-written."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Rewrite the file until the runs are over.")
    ] = False,
    interval: Annotated[
        str,
        typer.Option(
            "--interval",
            metavar="TIME",
            help="With --follow: time between two writes; at least 10s.",
        ),
    ] = "60s",
) -> int:
    """Write the numbers of runs as OpenMetrics text: steps, metrics, goodput and its parts, attempts, failures.

    \b
      paceline metrics 1a2b
      paceline metrics --active --follow -o /var/lib/node_exporter/paceline.prom
    """
    if active and names:
        raise UsageError(
            "--active cannot be combined with names of runs.", hint="Use only one of them."
        )
    if follow and output is None:
        raise UsageError("--follow needs a file to write to.", hint="Add -o FILE.")
    pause = max(MIN_INTERVAL, float(parse_wait(interval, "--interval")))
    while True:
        records = _read(None if active else [runs.named(name) for name in names or ["last"]])
        text = write_openmetrics(
            (read_details(each), read_last_values(each.folder.metrics)) for each in records
        )
        if output is None:
            sys.stdout.write(text)
        else:
            _write(output, text)
        if not follow or (not active and all(record.is_over for record in records)):
            return 0
        try:
            time.sleep(pause)
        except KeyboardInterrupt:
            console.say_note(f"{output} is not updated any more")
            raise


def _read(folders: list[RunFolder] | None) -> list[Record]:
    if folders is not None:
        return read_records(folders)
    scratch = runs.scratch_here()
    rows = read_rows(find_runs(scratch), scratch)
    return read_records([RunFolder(Path(row.path)) for row in rows if not row.is_over])


def _write(path: Path, text: str) -> None:
    try:
        write_output(path, text)
    except OSError as error:
        raise EnvironmentProblem(
            f"Cannot write {path}: {error.strerror}.", hint="Give another file."
        ) from None
