"""`paceline sweep show`: a sweep's trials and failures, as a table, a CSV file or a page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli import console, runs, typer_options
from paceline.cli.commands.report import write_report
from paceline.cli.tables import Column, fit, print_columns
from paceline.contract.files import is_standard_output, write_output
from paceline.contract.foreign_records import read_fields
from paceline.contract.sweep_folder import DONE, FAILED
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import cluster, quote, to_type
from paceline.sweep.overview import make_sweep_overview
from paceline.sweep.report import to_csv
from paceline.sweep.results import (
    MISSING,
    Row,
    Sweep,
    find_sweep,
    has_repeats,
    read_sweep,
    rows,
    sort_by,
    to_label,
    value_text,
)

COLOURS = {
    "done": "green",
    "pruned": "grey50",
    "failed": "red",
    "missing": "yellow",
    "running": "cyan",
    "pending": "grey30",
}
MAX_FAILURES = 10  # different reasons to show


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The sweep's name or its prefix, its folder, or `last`."
        ),
    ] = "last",
    *,
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="KEY",
            help="Sort by value, number, state, seconds or a parameter; -KEY reverses.",
        ),
    ] = "value",
    count: Annotated[int, typer.Option("-n", "--count", help="Show N rows; 0 shows all.")] = 20,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write all trials to FILE.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write an HTML page with plots to FILE."),
    ] = None,
    as_json: typer_options.AsJson = False,
) -> int:
    """Show a sweep: its trials, best first, its progress and its failures.

    \b
      paceline sweep show                          the newest sweep
      paceline sweep show digits --sort lr         sorted by a parameter
      paceline sweep show digits --csv digits.csv  all trials, for other programs
      paceline sweep show digits --report digits.html

    The report is one file, as of `paceline report`: Optuna's figures, and a table that sorts and filters.
    """
    folder = find_sweep(name, runs.scratch_here())
    sweep = read_sweep(folder)
    if csv is not None:
        typer_options.require_folder(csv)
        write_output(csv.absolute(), to_csv(sweep))
        say = console.say_note if is_standard_output(csv) else print
        console.describe_file(csv, f"wrote {len(sweep.trials)} trials to {{path}}", say)
    if report is not None:
        write_report(folder, report)
    if as_json:
        console.print_json(
            sweep=make_sweep_overview(sweep).to_json(),
            trials=[trial.to_json() for trial in sweep.trials],
        )
    elif csv is None and report is None:
        _print(sweep, sort_by(sweep, rows(sweep), sort), count)
    return 0


def _print(sweep: Sweep, ordered: list[Row], count: int) -> None:
    """Print how far the sweep is, its rows, and its failures."""
    out = console.console()
    listed = ordered if count <= 0 else ordered[:count]
    shown, dropped = fit(_columns(sweep, listed), out.width)
    aim = "larger" if sweep.maximizes else "smaller"
    counts = " · ".join(f"{number:,} {state}" for state, number in sweep.counts.items())
    head = f"  {sweep.metric}, {aim} is better\n{sweep.folder.path}"
    out.print(Text.assemble((console.printable(sweep.name), "bold"), console.printable(head)))
    out.print(f"{counts} of {len(sweep.trials):,}\n")
    print_columns(out, shown, out.width)
    if dropped:
        names = ", ".join(column.title for column in dropped)
        out.print(f"[dim]hidden columns: {names} (write all: --csv FILE)[/]")
    if len(listed) < len(ordered):
        more = f"… and {len(ordered) - len(listed):,} more (-n 0 shows all, --csv FILE writes them)"
        out.print(f"[dim]{more}[/]")
    for line in _failures(sweep):
        out.print(line)


def _columns(sweep: Sweep, listed: list[Row]) -> list[Column]:
    """Return the columns of the table. In a narrow terminal, parameters drop out: first those that never vary."""
    repeats = has_repeats(sweep)
    varying = {key for key in sweep.keys if len({str(row.point.get(key)) for row in listed}) > 1}
    parameters = [
        Column(console.cell(key), rank=1 + position, wraps_at=10)
        if key in varying
        else Column(
            console.cell(key), rank=1 + position + len(sweep.keys), wraps_at=10, optional=True
        )
        for position, key in enumerate(sweep.keys)
    ]
    columns = [
        Column("TRIAL"),
        Column("STATE", wraps_at=9),
        Column(console.cell(sweep.metric), justify="left" if repeats else "right"),
        *parameters,
        Column("TIME", rank=1 + 2 * len(sweep.keys), optional=True),
    ]
    for row in listed:
        numbers = [str(trial.number) for trial in row.trials]
        cells = (
            ",".join(numbers[:4]) + ",…" * (len(numbers) > 4),
            f"[{COLOURS[row.state]}]{row.status}[/]",
            value_text(row),
            *(
                console.cell(to_label(row.point[key])) if key in row.point else ""
                for key in sweep.keys
            ),
            "" if row.seconds is None else show_seconds(row.seconds),
        )
        for column, text in zip(columns, cells, strict=True):
            column.cells.append(text)
    return columns


def _failures(sweep: Sweep) -> list[Text]:
    """Return which trials failed, are missing or have no value, grouped by reason, and how to run them again."""
    lines: list[Text] = []
    for state in (DONE, FAILED, MISSING):
        reasons: dict[str, list[str]] = {}
        for trial in sweep.trials:
            if trial.state == state and (state != DONE or trial.error):
                error = trial.error or "no error recorded"
                reasons.setdefault(error, []).append(str(trial.number))
        if reasons:
            title = "done, without a value" if state == DONE else state
            lines.append(Text(f"\n{title}", "dim"))
        most_first = sorted(reasons.items(), key=lambda each: -len(each[1]))
        for error, numbers in most_first[:MAX_FAILURES]:
            more = f", … ({len(numbers):,})" if len(numbers) > 6 else ""
            trials = f"trial {', '.join(numbers[:6])}{more}: "
            lines.append(Text.assemble((trials, COLOURS[state]), console.printable(error)))
        if reasons and state != DONE:
            again = f"sweep {_local(sweep)}--resubmit {state} {quote(sweep.name)}"
            lines.append(Text(f"run again: {to_type(again)}", "dim"))
    return lines


def _local(sweep: Sweep) -> str:
    """Return the option that runs trials here, if the newest submission did so."""
    found = sweep.folder.submission(1).parent.glob("[0-9]*/run.json")
    newest = max(found, key=lambda path: int(path.parent.name), default=None)
    is_local = newest is not None and read_fields(newest).get("backend") == "local"
    return "--local " if is_local and not cluster() else ""
