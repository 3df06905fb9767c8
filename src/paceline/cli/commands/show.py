"""`paceline show`: show one run: what was requested, how it went, its curves, and where the time went."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli import console, runs, typer_options
from paceline.contract.checkpoint import find_best, find_checkpoints
from paceline.contract.files import write_output
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED
from paceline.errors import UsageError
from paceline.slurm.commands import known_jobs
from paceline.spec.quantities import show_seconds
from paceline.spec.shell_text import command_line, type_again
from paceline.ui.terminal import run_view
from paceline.watch import origin
from paceline.watch.details import RunDetails, read_details, write_openmetrics
from paceline.watch.failure import describe_start
from paceline.watch.metrics import Curves, MetricsReader, describe_throughput, read_last_values
from paceline.watch.overview import Overview, read_rows
from paceline.watch.records import Record, find_runs, read_record, read_records, typed_there

if TYPE_CHECKING:
    from rich.console import Console

INDENT = 11  # columns before the values
COMMANDS = ("command", "script", "earlier", "repeat")  # lines that people copy to a shell
PICTURE_WIDTH = 80  # in a pipe
MAX_PICTURE_WIDTH = 120
DIFF_COLOURS = {"+": console.GREEN, "-": console.RED, "@": "\033[36m", "d": console.BOLD}

Fact = tuple[str, str]


def command(
    run: runs.Run = "last",
    *,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Show how the code has changed since the run was started."),
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
      paceline show 1a2b --json     everything that is known about it
      paceline show --openmetrics --active -o paceline.prom
    """
    if openmetrics:
        return _write_openmetrics(run, active=active, output=output)
    if active or output is not None:
        raise UsageError("--active and --output need --openmetrics.", hint="Add --openmetrics.")
    if diff:
        return _show_differences(runs.named(run))
    record = read_record(runs.named(run))
    details = read_details(record)
    if as_json:
        console.print_json(**details.to_json())
    else:
        show_run(record, details, console.console())
    return 0


def _write_openmetrics(run: str, *, active: bool, output: Path | None) -> int:
    folders = [] if active else [runs.named(run)]
    if active:
        rows = read_rows(find_runs(runs.scratch_here()))
        folders = [RunFolder(Path(row.path)) for row in rows if not row.is_over]
    text = write_openmetrics(
        (read_details(record), read_last_values(record.folder.metrics))
        for record in read_records(folders)
    )
    if output is not None:
        write_output(output, text)
    else:
        sys.stdout.write(text)
    return 0


def _show_differences(folder: RunFolder) -> int:
    """Print how the project has changed since a run was started."""
    from paceline.launch.diff import compare_run

    found = compare_run(folder)
    if found.note:
        console.say_note(found.note)
    text = found.text or f"{found.project} has not changed since {folder.key} was started"
    for line in text.split("\n"):
        print(console.paint(console.printable(line), DIFF_COLOURS.get(line[:1], ""), sys.stdout))
    return 0


def show_run(record: Record, details: RunDetails, out: Console) -> None:
    """Print a run, the most important first."""
    width = _picture_width(out)
    _print_facts(state_facts(record, details.overview), out)
    if record.status != DONE:
        _print_lines(run_view.failure_lines(details.failure), out)
    with typed_there(record.folder):
        asked, commands = asked_facts(record, details), command_facts(record, details.commands)
    _print_facts(asked, out, apart=True)
    show_pictures(record, details, out)
    _print_lines(run_view.node_lines(details, width=width), out)
    _print_facts(commands, out, apart=True)


def show_pictures(record: Record, details: RunDetails, out: Console) -> None:
    """Print where the time of a run went, and its curves."""
    width = _picture_width(out)
    curves = Curves()
    curves.add(MetricsReader(record.folder.metrics).read_new())
    _print_lines(run_view.timeline_lines(details, width=width), out)
    # The time line of a single attempt is a bar of its goodput already.
    has_bar = len(details.attempts) > 1
    time_went = run_view.goodput_lines(details.goodput, width=width, with_bar=has_bar)
    _print_lines(time_went, out, apart=has_bar)
    loss = details.overview.loss_name
    _print_lines(run_view.curve_lines(curves.all(), first=loss, width=width), out)


def _picture_width(out: Console) -> int:
    width = PICTURE_WIDTH if out.width == console.PIPE_WIDTH else min(out.width, MAX_PICTURE_WIDTH)
    return width - INDENT


def _print_facts(facts: list[Fact], out: Console, *, apart: bool = False) -> None:
    """Print facts that are known; `apart` from what comes before, in a terminal."""
    # a word that is longer than a line stays whole, and a shell takes commands as they are copied
    lines = [
        (name, Text(console.printable(text), overflow="ignore", no_wrap=name in COMMANDS))
        for name, text in facts
        if text
    ]
    _print_lines(lines, out, apart=apart)


def _print_lines(lines: list[tuple[str, Text]], out: Console, *, apart: bool = True) -> None:
    """Print values beside their names. In a pipe, lines end where their text does."""
    if apart and lines and out.is_terminal:
        out.print()
    for name, text in lines:
        label = console.printable(name)
        for piece in text.wrap(out, max(20, out.width - INDENT)) or [Text()]:
            line = Text.assemble((f"{label:<{INDENT - 1}} ", "dim"), piece)
            line.rstrip()
            out.print(line, soft_wrap=True)
            label = ""


def state_facts(record: Record, overview: Overview) -> list[Fact]:
    """Return how a run stands: the most important first."""
    failed = [event for event in record.events if event["event"] == "save_failed"]
    last = failed[-1] if failed else {}
    saves = f"{len(failed)} failed, the last at step {last.get('step')}: {last.get('error')}"
    reasons = [str(event["reason"]) for event in record.events if event.get("reason")]
    age = 0.0 if record.is_over else origin.age()
    ago = f" {show_seconds(age)} ago" if age else ""
    detail = f" ({overview.detail})" if overview.detail else ""
    return [
        ("run", record.folder.key),
        ("name", str(record.details.get("name", ""))),
        ("status", f"{record.status}{ago}{detail}"),
        ("hint", record.hint),
        # each attempt shows its own failure; this is why the ranks of a run did not start
        ("why", reasons[-1] if reasons and record.status == FAILED else ""),
        ("step", _progress(overview)),
        ("speed", "" if record.is_waiting else describe_throughput(record.folder.metrics)),
        ("saves", saves if failed else ""),
    ]


def asked_facts(record: Record, details: RunDetails) -> list[Fact]:
    """Return what was asked for, and where it is."""
    run, folder, code = record.details, record.folder, details.code
    before = ", ".join(job for job in known_jobs(folder) if job != record.job)
    earlier = [each for each in run.get("earlier", []) if isinstance(each, dict)]
    module = ("-m",) if run.get("is_module") is True else ()
    script = [*module, str(run.get("program", "")), *map(str, run.get("args", []))]
    best = find_best(find_checkpoints(folder.path))
    # the working directory of a submitted run and, once it is over, what the script has written there
    work = folder.work / Path(str(code.get("folder", ""))).name
    written = [event.get("names", []) for event in record.events if event["event"] == "files"]
    names = f": {', '.join(map(str, written[-1]))}" if written else ""
    return [
        ("job", f"{record.job} (earlier: {before})" if before else record.job or ""),
        ("ranks", _ranks(record)),
        ("command", details.command),
        # the newest command of a run that goes on need not name the script
        ("script", command_line(script) if earlier else ""),
        ("earlier", "\n".join(type_again(each) for each in earlier)),
        ("config", " ".join(f"{key}={json.dumps(value)}" for key, value in details.config.items())),
        ("code", f"{str(code.get('commit') or '')[:10]}{' + changes' * bool(code.get('changed'))}"),
        ("folder", details.place),
        ("files", f"{work}{names}" if work.is_dir() else ""),
        ("best", f"step {best[0]} ({best[1].metric} {best[1].value:.5g})" if best else ""),
    ]


def command_facts(record: Record, commands: dict[str, str]) -> list[Fact]:
    """Return what to type next."""
    resume = commands.get("resume", "")
    start = f"  ({describe_start(record.folder)})" if resume else ""
    others = ((name, commands.get(name, "")) for name in ("repeat", "logs", "fetch", "cancel"))
    return [("continue", resume + start), *others]


def _progress(overview: Overview) -> str:
    if overview.step is None:
        return ""
    share = (
        f" of {overview.total_steps} ({min(1.0, overview.step / overview.total_steps):.0%})"
        if overview.total_steps
        else ""
    )
    left = "" if overview.seconds_left is None else f"{show_seconds(overview.seconds_left)} left"
    loss = "" if overview.loss is None else f"{overview.loss_name} {overview.loss:.4g}"
    return " · ".join(filter(None, (f"{overview.step}{share}", left, loss)))


def _ranks(record: Record) -> str:
    details = record.details
    style = f"{details.get('style', '?')} style"
    for event in record.events:
        if event["event"] == "independent" and event.get("attempt") == record.attempts:
            number = int(event.get("processes", 0))
            what = f"{number} independent processes" if number > 1 else "1 process"
            return f"{what} ({style})"
    nodes, nproc = details.get("nodes", "?"), details.get("nproc", "?")
    return f"{nodes} node{'s' * (nodes != 1)} x {nproc} rank{'s' * (nproc != 1)} ({style})"
