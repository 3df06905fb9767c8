"""`paceline show`: show one run: what was requested, how it went, its curves, and where the time went."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import cluster_views, console, runs, typer_options
from paceline.cli.console import print_json
from paceline.cli.wrapped_text import wrap_text
from paceline.contract.checkpoint import find_best, find_checkpoints
from paceline.contract.files import write_output
from paceline.contract.frameworks import PRESETS, describe_contract
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from paceline.contract.verdict import DONE, FAILED, STOPPED_EXIT
from paceline.errors import UsageError
from paceline.slurm.commands import known_jobs
from paceline.spec.quantities import brief_seconds, show_seconds
from paceline.spec.shell_text import command_line, type_again
from paceline.watch import origin
from paceline.watch.curves import Curves, MetricsReader
from paceline.watch.details import RunDetails, flatten, read_config, read_details
from paceline.watch.events import describe_start_phases
from paceline.watch.failure import describe_start
from paceline.watch.latest import describe_throughput, read_last_values
from paceline.watch.openmetrics import write_openmetrics
from paceline.watch.overview import Overview, read_rows
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


Fact = tuple[str, str]


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
        rows = read_rows(find_runs(scratch))
        folders = [RunFolder(Path(row.path)) for row in rows if not row.is_over]
    text = write_openmetrics(
        (read_details(record), read_last_values(record.folder.metrics))
        for record in read_records(folders)
    )
    if output is None:
        sys.stdout.write(text)
        return 0
    write_output(output, text)
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
    """Return a value, indented, that a terminal does not break within words. In a pipe, lines stay whole.

    So do commands: a shell takes them as they are copied.
    """
    if width != console.PIPE_WIDTH and name not in COMMANDS:
        text = wrap_text(text, width - INDENT)
    return text.replace("\n", f"\n{'':<{INDENT}}")


def state_facts(record: Record, overview: Overview) -> list[Fact]:
    """Return how a run stands: the most important first."""
    failed = [event for event in record.events if event["event"] == "save_failed"]
    saves = ""
    if failed:
        step, error = failed[-1].get("step", "?"), failed[-1].get("error", "")
        saves = f"{len(failed)} failed, the last at step {step}: {error}"
    reasons = [str(event["reason"]) for event in record.events if event.get("reason")]
    age = 0.0 if record.is_over else origin.age()
    ago = f" {brief_seconds(age)} ago" if age else ""
    detail = f" ({overview.detail})" if overview.detail else ""
    return _known(
        ("run", record.folder.key),
        ("name", str(record.details.get("name", ""))),
        ("status", f"{record.status}{ago}{detail}"),
        ("hint", record.hint),
        # each attempt shows its own failure; this is why the ranks of a run did not start
        ("why", reasons[-1] if reasons and record.status == FAILED else ""),
        ("step", _progress(overview)),
        ("speed", "" if record.is_waiting else describe_throughput(record.folder.metrics)),
        ("saves", saves),
    )


def asked_facts(record: Record) -> list[Fact]:
    """Return what was asked for, and where it is."""
    details, folder = record.details, record.folder
    code = details.get("code") or {}
    commit = str(code.get("commit") or "")[:10]
    before = [job for job in known_jobs(folder) if job != record.job]
    earlier = [each for each in details.get("earlier", []) if isinstance(each, dict)]
    module = ("-m",) if details.get("is_module") is True else ()
    script = [*module, str(details.get("program", "")), *map(str, details.get("args", []))]
    config = flatten(read_config(folder))
    best = find_best(find_checkpoints(folder.path))
    return _known(
        ("job", f"{record.job} (earlier: {', '.join(before)})" if before else record.job or ""),
        ("ranks", _ranks(record)),
        ("stop", _stop(record)),
        ("command", type_again(details)),
        # the newest command of a run that goes on need not name the script
        ("script", command_line(script) if earlier else ""),
        ("earlier", "\n".join(type_again(each) for each in earlier)),
        ("config", " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())),
        ("code", f"{commit}{' + changes' if code.get('changed') else ''}"),
        ("folder", origin.place(folder.path)),
        ("files", _files(record)),
        ("start", describe_start_phases(record.events)),
        ("best", f"step {best[0]} ({best[1].metric} {best[1].value:.5g})" if best else ""),
    )


def command_facts(record: Record, commands: dict[str, str]) -> list[Fact]:
    """Return what to type next."""
    resume = commands.get("resume", "")
    if resume:
        resume += f"  ({describe_start(record.folder)})"
    others = ((name, commands.get(name, "")) for name in ("repeat", "logs", "fetch", "cancel"))
    return _known(("continue", resume), *others)


def _known(*facts: Fact) -> list[Fact]:
    return [(name, text) for name, text in facts if text]


def _progress(overview: Overview) -> str:
    if overview.step is None:
        return ""
    parts = [str(overview.step)]
    if overview.total_steps:
        share = min(1.0, overview.step / overview.total_steps)
        parts[0] += f" of {overview.total_steps} ({share:.0%})"
    if overview.seconds_left is not None:
        parts.append(f"{show_seconds(overview.seconds_left)} left")
    if overview.loss is not None:
        parts.append(f"{overview.loss_name} {overview.loss:.4g}")
    return " · ".join(parts)


def _ranks(record: Record) -> str:
    details = record.details
    style = f"{details.get('style', '?')} style"
    for event in record.events:
        if event["event"] == "independent" and event.get("attempt") == record.attempts:
            number = int(event.get("processes", 0))
            what = f"{number} independent processes" if number > 1 else "1 process"
            return f"{what} ({style})"
    nodes, ranks = _count(details.get("nodes"), "node"), _count(details.get("nproc"), "rank")
    return f"{nodes} x {ranks} ({style})"


def _count(number: object, noun: str) -> str:
    return f"{'?' if number is None else number} {noun}{'s' * (number != 1)}"


def _stop(record: Record) -> str:
    """Return how a script without the runtime is asked to stop, if that is set or its framework has
    a preset.
    """
    try:
        spec = LaunchSpec.from_json(record.folder.launch_spec.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    names: list[Any] = [
        event.get("name") for event in record.events if event["event"] == "framework"
    ]
    preset = next((preset for preset in PRESETS if names and preset.name == names[-1]), None)
    if preset is None and not spec.stop_signal and spec.saved_exit_code == STOPPED_EXIT:
        return ""
    return describe_contract(spec.stop_signal, spec.saved_exit_code, preset)


def _files(record: Record) -> str:
    """Return the working directory of a submitted run and, once it is over, what the script has
    written there.
    """
    path = record.folder.work / Path(str((record.details.get("code") or {}).get("folder", ""))).name
    names = [event.get("names", []) for event in record.events if event["event"] == "files"]
    written = f": {', '.join(map(str, names[-1]))}" if names else ""
    return f"{path}{written}" if path.is_dir() else ""
