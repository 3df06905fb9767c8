"""`paceline show`: show one run: what was requested, how it went, its curves, and where the time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import cluster_views, console, runs, typer_options
from paceline.cli.json_output import print_json
from paceline.cli.views.show_facts import asked_facts, command_facts, state_facts
from paceline.cli.wrapped_text import wrap_command, wrap_text
from paceline.contract.output_file import write_output
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE
from paceline.errors import EnvironmentProblem, UsageError
from paceline.watch.curves import Curves, MetricsReader
from paceline.watch.details import RunDetails, read_details
from paceline.watch.index import read_rows
from paceline.watch.latest import read_last_values
from paceline.watch.openmetrics import write_openmetrics
from paceline.watch.records import Record, find_runs, read_record, read_records, typed_there

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

INDENT = 11  # columns before the values
COMMANDS = ("command", "script", "earlier", "repeat")  # lines that people copy to a shell
CYAN = "\033[36m"
PICTURE_WIDTH = 80  # in a pipe
MAX_PICTURE_WIDTH = 120

forwarded = cluster_views.forwarded  # with --on


def command(
    run: runs.Run = "last",
    *,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Show how the code has changed since the run was started."),
    ] = False,
    stat: Annotated[
        bool, typer.Option("--stat", help="Show only the names of changed files and line counts.")
    ] = False,
    plots: Annotated[
        bool, typer.Option("--plots", help="Show only the curves, and where the time went.")
    ] = False,
    as_json: typer_options.AsJson = False,
    openmetrics: Annotated[
        bool,
        typer.Option(
            "--openmetrics", help="Print its numbers as OpenMetrics text, for monitoring."
        ),
    ] = False,
    active: Annotated[
        bool, typer.Option("--active", help="With --openmetrics: all your queued and running runs.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="With --openmetrics: replace this file."
        ),
    ] = None,
) -> int:
    """Show one run: its status, what you asked for, its curves and nodes, and where the time went.

    \b
      paceline show                 the newest run
      paceline show 1a2b --diff     what has changed in the project since 1a2b was started
      paceline show 1a2b --stat     the same, one line per file
      paceline show 1a2b --json     everything that is known about it
      paceline show --openmetrics --active -o paceline.prom
    """
    if openmetrics:
        return _write_openmetrics(None if active else runs.named(run), output)
    if active or output is not None:
        raise UsageError("--active and --output need --openmetrics.", hint="Add --openmetrics.")
    if diff or stat:
        return _show_differences(runs.named(run), names_only=stat)
    record = read_record(runs.named(run))
    details = read_details(record)
    if as_json:
        print_json(**details.to_json())
    elif plots:
        show_pictures(record, details, console.console())
    else:
        show_run(record, details, console.console())
    return 0


def _write_openmetrics(folder: RunFolder | None, output: Path | None) -> int:
    """Write the numbers of a run, or of all that are queued or running."""
    folders = [folder] if folder is not None else []
    if folder is None:
        scratch = runs.scratch_here()
        rows = read_rows(find_runs(scratch), scratch)
        folders = [RunFolder(Path(row.path)) for row in rows if not row.is_over]
    text = write_openmetrics(
        (read_details(record), read_last_values(record.folder.metrics))
        for record in read_records(folders)
    )
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        write_output(output, text)
    except OSError as error:
        raise EnvironmentProblem(
            f"Cannot write {output}: {error.strerror}.", hint="Give another file."
        ) from None
    return 0


def _show_differences(folder: RunFolder, *, names_only: bool) -> int:
    """Print how the project has changed since a run was started."""
    from paceline.launch.diff import ADDED, REMOVED, compare_run

    found = compare_run(folder)
    for note in found.notes:
        console.say_note(note)
    if not found.files:
        print(f"{found.project} has not changed since {folder.key} was started")
    colours = {"+": console.GREEN, "-": console.RED, "@": CYAN, "~": CYAN}
    for each in found.files:
        mark = {ADDED: "+", REMOVED: "-"}.get(each.kind, "~")
        if names_only or not each.lines:
            counts = f"  +{each.added} -{each.removed}" if each.lines else ""
            note = f"  ({each.note})" if each.note else ""
            name = console.printable(each.name)
            print(console.paint(f"{mark} {name}", colours[mark], sys.stdout) + counts + note)
            continue
        for number, line in enumerate(each.lines):
            colour = colours.get(line[:1], "") if number > 1 else console.BOLD
            text = console.printable(line)
            print(console.paint(text, colour, sys.stdout) if colour else text)
    return 0


def show_run(record: Record, details: RunDetails, out: Console) -> None:
    """Print a run, the most important first."""
    from paceline.ui.terminal.run_view import failure_lines, node_lines

    width, unicode = _picture_size(out)
    _print_facts(state_facts(record, details.overview), out)
    _print_lines([] if record.status == DONE else failure_lines(details.failure), out)
    with typed_there(record.folder):
        asked, commands = asked_facts(record), command_facts(record, details.commands)
    _print_facts(asked, out, apart=True)
    show_pictures(record, details, out)
    _print_lines(node_lines(details, width=width, unicode=unicode), out)
    _print_facts(commands, out, apart=True)


def show_pictures(record: Record, details: RunDetails, out: Console) -> None:
    """Print where the time of a run went, and its curves."""
    from paceline.ui.terminal.run_view import curve_lines, goodput_lines, timeline_lines

    width, unicode = _picture_size(out)
    curves, metrics = Curves(), MetricsReader(record.folder.metrics)
    curves.add(metrics.read_new())
    _print_lines(timeline_lines(details, width=width, unicode=unicode), out)
    # The time line of a single attempt is a bar of its goodput already.
    has_bar = len(details.attempts) > 1
    _print_lines(
        goodput_lines(details.goodput, width=width, unicode=unicode, with_bar=has_bar),
        out,
        apart=has_bar,
    )
    _print_lines(
        curve_lines(curves.all(), first=details.overview.loss_name, width=width, unicode=unicode),
        out,
    )
    if metrics.is_sampled:
        _print_facts(
            [("", "The metrics file is large: these curves are drawn from a sample of its lines.")],
            out,
        )


def _picture_size(out: Console) -> tuple[int, bool]:
    """Return how wide pictures may be, and whether they may have more characters than ASCII."""
    from paceline.ui.terminal.plots import supports_unicode

    width = PICTURE_WIDTH if out.width == console.PIPE_WIDTH else min(out.width, MAX_PICTURE_WIDTH)
    return width - INDENT, supports_unicode(out.encoding)


def _print_facts(facts: list[tuple[str, str]], out: Console, *, apart: bool = False) -> None:
    """Print facts; `apart` from what comes before, in a terminal."""
    if apart and facts and out.is_terminal:
        out.print()
    for name, text in facts:
        out.print(f"[dim]{name:<{INDENT - 1}}[/] ", end="")
        out.print(_wrap(name, console.printable(text), out.width), markup=False, soft_wrap=True)


def _print_lines(lines: list[tuple[str, Text]], out: Console, *, apart: bool = True) -> None:
    """Print lines of pictures. Text in them wraps; in a pipe, lines end where their text does."""
    from rich.text import Text

    if apart and lines and out.is_terminal:
        out.print()
    for name, text in lines:
        first = Text(f"{console.printable(name):<{INDENT - 1}} ", "dim")
        width = max(20, out.width - INDENT)
        pieces = [
            piece
            for line in text.split("\n")
            for piece in (line.wrap(out, width) if len(line) > width else [line])
        ]
        for piece in pieces or [Text()]:
            piece.rstrip()
            line = Text.assemble(first, piece)
            line.rstrip()
            out.print(line, soft_wrap=True)
            first = Text(" " * INDENT)


def _wrap(name: str, text: str, width: int) -> str:
    """Return a value, indented, that a terminal does not break within words. In a pipe its lines stay whole."""
    if width != console.PIPE_WIDTH:
        text = (wrap_command if name in COMMANDS else wrap_text)(text, width - INDENT)
    return text.replace("\n", f"\n{'':<{INDENT}}")
