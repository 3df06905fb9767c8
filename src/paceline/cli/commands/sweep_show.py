"""`paceline sweep show`: a sweep's trials and failures, as a table, a CSV file or a page with plots."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, runs, typer_options
from paceline.cli.commands.report import write_report
from paceline.cli.console import print_json
from paceline.cli.remote_output import describe
from paceline.cli.tables import Column, fit, make_table
from paceline.contract.files import is_standard_output, write_output
from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import RunFolder
from paceline.contract.sweep_folder import DONE, FAILED
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import cluster, quote, to_type
from paceline.sweep.overview import make_sweep_overview
from paceline.sweep.results import MISSING, PENDING, RUNNING, Sweep, find_sweep, read_sweep
from paceline.sweep.rows import Row, has_repeats, rows, sort_by, to_label, value_text

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 60
COLOURS = {
    "done": "green",
    "pruned": "grey50",
    "failed": "red",
    "missing": "yellow",
    "running": "cyan",
    "pending": "grey30",
}
GLYPHS = {"running": "▒", "pending": "░"}  # without colours, they tell what is still to do
MAX_FAILURES = 10  # different reasons to show
WATCH_INTERVAL = 3.0  # seconds


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
    watch: Annotated[
        bool, typer.Option("--watch", help="Update until all trials have ended.")
    ] = False,
    as_json: typer_options.AsJson = False,
) -> int:
    """Show a sweep: its trials, best first, its progress and its failures.

    \b
      paceline sweep show                          the newest sweep
      paceline sweep show digits --sort lr         sorted by a parameter
      paceline sweep show digits --csv digits.csv  all trials, for other programs
      paceline sweep show digits --report digits.html
      paceline sweep show digits --watch           until all trials have ended

    The report is one file, as of `paceline report`: Optuna's figures, and a table that sorts and filters.
    """
    folder = find_sweep(name, runs.scratch_here())
    sweep = read_sweep(folder)
    if csv is not None or report is not None:
        _write(sweep, csv, report)
        return 0
    if as_json:
        print_json(
            sweep=make_sweep_overview(sweep).to_json(),
            trials=[trial.to_json() for trial in sweep.trials],
        )
        return 0
    sort_by(sweep, [], sort)  # reject a wrong key before showing anything
    out = console.console()
    if watch and _is_live(sweep):
        from rich.live import Live

        with Live(_render(sweep, sort, count, out.width), console=out, auto_refresh=False) as live:
            while _is_live(sweep):
                time.sleep(WATCH_INTERVAL)
                sweep = read_sweep(folder)
                live.update(_render(sweep, sort, count, out.width), refresh=True)
        return 0
    out.print(_render(sweep, sort, count, out.width))
    return 0


def _is_live(sweep: Sweep) -> bool:
    return any(trial.state in (RUNNING, PENDING) for trial in sweep.trials)


def _write(sweep: Sweep, csv: Path | None, report: Path | None) -> None:
    from paceline.sweep.report import to_csv

    for path in filter(None, (csv, report)):
        typer_options.require_folder(path)
    if csv is not None:
        write_output(csv.absolute(), to_csv(sweep))
        count = len(sweep.trials)
        say = console.say_note if is_standard_output(csv) else print
        describe(csv, f"wrote {count} trial{'s' * (count != 1)} to {{path}}", say)
    if report is not None:
        write_report(sweep.folder, report)


def _render(sweep: Sweep, sort: str, count: int, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    ordered = sort_by(sweep, rows(sweep), sort)
    listed = ordered if count <= 0 else ordered[:count]
    shown, dropped = fit(_columns(sweep, listed), width)
    parts: list[RenderableType] = [_head(sweep), _bar(sweep), Text(""), make_table(shown, width)]
    if dropped:
        names = ", ".join(Text.from_markup(column.title).plain for column in dropped)
        parts.append(Text(f"hidden columns: {names} (write all: --csv FILE)", "dim"))
    if len(listed) < len(ordered):
        parts.append(
            Text(
                f"… and {len(ordered) - len(listed):,} more (-n 0 shows all, --csv FILE writes them)",
                "dim",
            )
        )
    return Group(*parts, *_failures(sweep))


def _head(sweep: Sweep) -> Any:
    from rich.text import Text

    aim = "larger" if sweep.maximizes else "smaller"
    text = Text(console.printable(sweep.name), "bold")
    text.append(f"  {console.printable(sweep.metric)}, {aim} is better", "dim not bold")
    return text.append(f"\n{console.printable(str(sweep.folder.path))}", "dim not bold")


def _bar(sweep: Sweep) -> Any:
    """Return the progress: one coloured bar and the counts."""
    from rich.text import Text

    total = max(1, len(sweep.trials))
    text, used, seen = Text(), 0, 0
    for state, count in sweep.counts.items():
        seen += count
        # Round where each piece ends, so that they add up; every piece gets at least one cell.
        end = min(WIDTH, max(round(WIDTH * seen / total), used + 1))
        text.append(GLYPHS.get(state, "█") * (end - used), COLOURS[state])
        used = end
    counts = [f"{count:,} {state}" for state, count in sweep.counts.items()]
    return text.append(f"\n{' · '.join(counts)} of {len(sweep.trials):,}", "default")


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
        cells = (
            str(row.number) if len(row.trials) == 1 else _numbers(row),
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


def _numbers(row: Row) -> str:
    """Return the numbers of a point's trials, such as `0-4`."""
    numbers = [trial.number for trial in row.trials]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers[:4])) + (",…" if len(numbers) > 4 else "")


def _ran_here(sweep: Sweep) -> bool:
    """Return whether a sweep's trials run without Slurm. Its jobs say so, or else what it was prepared for."""
    if cluster() or any(trial.job for trial in sweep.trials):
        return False
    folders = sweep.folder.submission(1).parent.glob("*")
    for folder in sorted(folders, key=lambda each: (len(each.name), each.name), reverse=True):
        with suppress(OSError, ValueError):
            return read_object(RunFolder(folder).run_json).get("backend") != "slurm"
    return any(trial.folder.path.exists() for trial in sweep.trials)


def _failures(sweep: Sweep) -> list[Any]:
    """Return which trials failed, are missing or have no value, grouped by reason, and how to run them again."""
    from rich.text import Text

    lines: list[Any] = []
    for state, colour in ((DONE, "yellow"), (FAILED, "red"), (MISSING, "yellow")):
        reasons: dict[str, list[int]] = {}
        for trial in sweep.trials:
            if trial.state == state and (state != DONE or trial.error):
                reasons.setdefault(trial.error or "no error recorded", []).append(trial.number)
        if not reasons:
            continue
        lines += [Text(""), Text("done, without a value" if state == DONE else state, "dim")]
        for error, numbers in sorted(reasons.items(), key=lambda each: -len(each[1]))[
            :MAX_FAILURES
        ]:
            more = f", … ({len(numbers):,})" if len(numbers) > 6 else ""
            listed = ", ".join(map(str, numbers[:6])) + more
            lines.append(Text.assemble((f"trial {listed}: ", colour), console.printable(error)))
        if len(reasons) > MAX_FAILURES:
            lines.append(Text(f"… and {len(reasons) - MAX_FAILURES} other reasons", "dim"))
        if state == DONE:
            continue
        local = "--local " if _ran_here(sweep) else ""
        lines.append(
            Text(
                f"run again: {to_type(f'sweep {local}--resubmit {state} {quote(sweep.name)}')}",
                "dim",
            )
        )
    return lines
