"""`paceline show`: show one run: what was requested, how it went, its curves, and where the time went."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli import console, runs, typer_options
from paceline.contract.checkpoint import find_best, find_checkpoints
from paceline.contract.files import show_size
from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import DONE, FAILED, RunFolder
from paceline.errors import EnvironmentProblem
from paceline.launch.code_snapshot import find_code, list_copy
from paceline.launch.submission import run_folders_inside
from paceline.slurm.commands import known_jobs
from paceline.spec.run_path import run_path_of
from paceline.spec.shell_text import command_line
from paceline.spec.user_files import require_own_folder
from paceline.ui.terminal import run_view
from paceline.ui.terminal.run_view import Fact
from paceline.watch.details import RunDetails, read_details, type_again
from paceline.watch.failure import describe_start
from paceline.watch.metrics import Curves, MetricsReader, describe_throughput
from paceline.watch.overview import Overview
from paceline.watch.records import Record, read_record, typed_there

if TYPE_CHECKING:
    from rich.console import Console


INDENT = 11  # columns before the values
COMMANDS = ("command", "script", "earlier", "repeat")  # lines that people copy to a shell
PICTURE_WIDTH = 80  # in a pipe
MAX_PICTURE_WIDTH = 120
DIFF_COLOURS = {"+": console.GREEN, "-": console.RED, "@": "\033[36m", "d": console.BOLD}


def command(
    run: runs.Run = "last",
    *,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Show how the code has changed since the run was started."),
    ] = False,
    as_json: typer_options.AsJson = False,
) -> int:
    """Show one run: its status, what you asked for, its curves and nodes, and where the time went.

    \b
      paceline show                 the newest run
      paceline show 1a2b --diff     what has changed in the project since 1a2b was started
      paceline show 1a2b --json     everything that is known about it
    """
    if diff:
        return _show_differences(runs.named(run))
    record = read_record(runs.named(run))
    details = read_details(record)
    if as_json:
        console.print_json(**details.to_json())
    else:
        show_run(record, details, console.console())
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
    state = dict(run_view.state_facts(overview))
    state["speed"] = "" if record.is_waiting else describe_throughput(record.folder.metrics)
    return [
        ("run", record.folder.key),
        ("name", str(record.details.get("name", ""))),
        *state.items(),
        # each attempt shows its own failure; this is why the ranks of a run did not start
        ("why", reasons[-1] if reasons and record.status == FAILED else ""),
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
        run_view.config_fact(details),
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


LARGE = 2**20  # bytes; the lines of larger files are not compared


def _show_differences(folder: RunFolder) -> int:
    """Print how the project has changed since a run was started. Raises an error if either's code
    is not there.

    Of your own runs only: the record of another user's could name any folder of yours as its
    project.
    """
    require_own_folder(folder.path, "Run")
    record = read_fields(folder.run_json)
    code, spec = record.get("code") or {}, record.get("spec") or {}
    project = Path(code.get("folder") or "")
    if not folder.code.is_dir():
        commit = code.get("commit")
        raise EnvironmentProblem(
            f"{folder.path.name} has no copy of its code: it runs, or ran, in place.",
            hint=f"It was started from commit {commit}: git -C {project} diff {commit}"
            if commit
            else "Start runs without --no-snapshot to keep a copy.",
        )
    if not project.is_dir():
        raise EnvironmentProblem(
            f"The project of {folder.path.name} is gone: there is no folder {project}.",
            hint=f"Its code is in {folder.code}.",
        )
    environment, settings = spec.get("environment", {}), spec.get("project", {})
    named = (project / name for name in environment.get("secret_files", ()))
    found = compare_code(
        folder.code.resolve(),
        project,
        exclude=settings.get("exclude", ()),
        exclude_paths=[*run_folders_inside(project, run_path_of(folder)), *named],
    )
    if record.get("backend") == "slurm" and settings.get("workdir") != "snapshot":
        console.say_note(
            "this run imports its code from the copy, but reads other files from the project as it "
            "is now"
        )
    text = "\n".join(found) or f"{project} has not changed since {folder.key} was started"
    for line in text.split("\n"):
        print(console.paint(console.printable(line), DIFF_COLOURS.get(line[:1], ""), sys.stdout))
    return 0


def compare_code(
    then: Path, now: Path, *, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> Iterator[str]:
    """Yield the lines of a diff between a snapshot and the project, by the rules that the snapshot
    was made by.
    """
    after, _ = find_code(now, exclude=exclude, exclude_paths=exclude_paths)
    contents = [
        {name: content for name in names if (content := _read(folder / name)) is not None}
        for folder, names in ((then, list_copy(then)), (now, after))
    ]
    for name in sorted({*contents[0], *contents[1]}):
        old, new = (each.get(name) for each in contents)
        if old is None or new is None:
            yield f"diff {name}: {'added' if old is None else 'removed'}"
        elif max(len(old), len(new)) > LARGE or b"\0" in old + new:
            if old != new:
                yield f"diff {name}: changed ({show_size(len(old))} -> {show_size(len(new))})"
        else:
            lines, lines_now = (each.decode(errors="replace").splitlines() for each in (old, new))
            yield from difflib.unified_diff(
                lines, lines_now, f"run/{name}", f"now/{name}", lineterm=""
            )


def _read(path: Path) -> bytes | None:
    """Return the content of a file, the target of a link, or None of a folder."""
    if path.is_symlink():
        return os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else None
