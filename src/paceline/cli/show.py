"""`paceline show`: show one run, and where its time went."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import console, runs
from paceline.cli.wrapped_text import wrap_command, wrap_text
from paceline.cluster.slurm.sbatch import known_jobs
from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.score import find_best
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder
from paceline.contract.stop.presets import PRESETS, describe_contract
from paceline.contract.verdict import DONE, FAILED, STOPPED_EXIT, read_verdict
from paceline.plan.quote import command_line
from paceline.spec.quantities import show_seconds
from paceline.watch.config import flatten, read_config
from paceline.watch.failures import failure_text, read_failure
from paceline.watch.goodput import SHARES, Goodput, compute_goodput, find_end, read_events
from paceline.watch.goodput.start_phases import describe_start_phases
from paceline.watch.node_usage import read_node_usage
from paceline.watch.records import Record, read_record
from paceline.watch.resume_hint import describe_start, resume_command
from paceline.watch.throughput import describe_throughput

WIDTH = 60
INDENT = 11  # columns before the values
COMMANDS = ("command", "script", "before")  # lines that people copy to a shell
MAX_NODES = 8  # nodes whose usage is shown
COLOURS = {
    "queued": "grey50", "starting": "yellow", "running": "blue", "training": "green", "saving": "cyan", "lost": "red",
    "idle": "grey30",
}  # fmt: skip


def command(
    run: runs.Run = "last",
    *,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show how the code has changed since the run was started.")
    ] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Show only the names of changed files and line counts.")] = False,
) -> int:
    """Show one run: its settings, its attempts, and where its time went.

    \b
      paceline show                 the newest run
      paceline show 1a2b --diff     what has changed in the project since 1a2b was started
      paceline show 1a2b --stat     the same, one line per file
    """
    if diff or stat:
        from paceline.cli.show_diff import show_differences

        return show_differences(runs.named(run), names_only=stat)
    record = read_record(runs.named(run))
    out = console.console()
    lines = [*_facts(record), *((f"attempt {each.number}", _attempt(each)) for each in record.folder.attempts())]
    nodes = read_node_usage(record.folder, max_nodes=MAX_NODES)
    lines += [(f"node {each.node}", each.summary()) for each in nodes]
    if len(nodes) == MAX_NODES < int(record.details.get("nodes") or 1):
        lines.append(("", f"and more: {record.folder.system}"))
    for name, text in lines:
        out.print(f"[dim]{name:<{INDENT - 1}}[/] ", end="")
        out.print(_wrap(name, console.printable(text), out.width), markup=False, soft_wrap=True)
    events = read_events(record.folder.events)
    shares = compute_goodput(events, find_end(record.folder, events) if record.is_over else time.time())
    if shares.total > 0:
        out.print(bar(shares))
        parts = [f"{name} {shares.share(name):.0%}" for name in SHARES if shares.seconds[name] > 0]
        out.print(f"{' · '.join(parts)} of {show_seconds(shares.total)}", markup=False)
    return 0


def _wrap(name: str, text: str, width: int) -> str:
    """Return a value, indented, that a terminal does not break within words. In a pipe its lines stay whole."""
    if width != console.PIPE_WIDTH:
        text = (wrap_command if name in COMMANDS else wrap_text)(text, width - INDENT)
    return text.replace("\n", f"\n{'':<{INDENT}}")


def _facts(record: Record) -> list[tuple[str, str]]:
    details = record.details
    code = details.get("code") or {}
    commit = str(code.get("commit") or "")[:10]
    facts = [
        ("run", record.run_id),
        ("name", str(details.get("name", ""))),
        ("status", f"{record.status}{f' ({record.detail})' if record.detail else ''}"),
        ("hint", record.hint),
        ("why", _why(record)),
        ("job", _jobs(record)),
        ("ranks", _ranks(record)),
        ("stop", _stop(record)),
        ("command", _command(details)),
        ("script", _script(details)),
        ("before", "\n".join(_command(each) for each in _earlier(details))),
        ("config", _config(record)),
        ("code", f"{commit}{' + changes' if code.get('changed') else ''}"),
        ("folder", str(record.folder.path)),
        ("files", _files(record)),
        ("step", "" if record.step is None else str(record.step)),
        ("start", describe_start_phases(read_events(record.folder.events))),
        ("speed", describe_throughput(record.folder.metrics)),
        ("saves", _failed_saves(record)),
        ("best", _best(record)),
        ("to go on", _resume(record)),
    ]
    return [(name, text) for name, text in facts if text]


def _command(start: dict[str, Any]) -> str:
    """Return what was typed to start a run, or to go on with it."""
    found = start.get("command")
    return command_line(str(arg) for arg in found) if isinstance(found, list) else ""


def _script(details: dict[str, Any]) -> str:
    """Return what a run that goes on runs now: its newest command need not name the script."""
    if not _earlier(details):
        return ""
    module = ("-m",) if details.get("is_module") is True else ()
    return command_line([*module, str(details.get("program", "")), *map(str, details.get("args", []))])


def _earlier(details: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in details.get("earlier", []) if isinstance(each, dict)]


def _config(record: Record) -> str:
    """Return what the script has passed to run.config."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in flatten(read_config(record.folder)).items())


def _jobs(record: Record) -> str:
    """Return the run's newest job, and those that it had before."""
    if record.job is None:
        return ""
    before = [job for job in known_jobs(record.folder) if job != record.job]
    return f"{record.job} (before: {', '.join(before)})" if before else record.job


def _resume(record: Record) -> str:
    """Return what to type to go on with a run that is over, but not done."""
    if not record.is_over or record.status == DONE:
        return ""
    return f"{resume_command(record.folder, job=record.job)}  ({describe_start(record.folder)})"


def _ranks(record: Record) -> str:
    details = record.details
    style = f"{details.get('style', '?')} style"
    for event in read_events(record.folder.events):
        if event["event"] == "independent" and event.get("attempt") == record.attempts:
            processes = int(event.get("processes", 0))
            return f"{processes} independent processes ({style})" if processes > 1 else f"1 process ({style})"
    return f"{details.get('nodes', '?')} x {details.get('nproc', '?')} per node ({style})"


def _stop(record: Record) -> str:
    """Return how a script without the runtime is asked to stop, if that is set or its framework has a preset."""
    try:
        spec = LaunchSpec.from_json(record.folder.launch_spec.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    names = [event.get("name") for event in read_events(record.folder.events) if event["event"] == "framework"]
    preset = next((preset for preset in PRESETS if names and preset.name == names[-1]), None)
    if preset is None and not spec.stop_signal and spec.saved_exit_code == STOPPED_EXIT:
        return ""
    return describe_contract(spec.stop_signal, spec.saved_exit_code, preset)


def _why(record: Record) -> str:
    """Return why a failed run did not start its ranks; each attempt shows its own failure."""
    if record.status != FAILED:
        return ""
    reasons = [str(event["reason"]) for event in read_events(record.folder.events) if event.get("reason")]
    return reasons[-1] if reasons else ""


def _files(record: Record) -> str:
    """Return the working directory of a submitted run and, once it is over, what the script has written there."""
    path = record.folder.work / Path(str((record.details.get("code") or {}).get("folder", ""))).name
    if not path.is_dir():
        return ""
    names = [event.get("names", []) for event in read_events(record.folder.events) if event["event"] == "files"]
    return f"{path}{': ' + ', '.join(map(str, names[-1])) if names else ''}"


def _failed_saves(record: Record) -> str:
    """Return how many checkpoints could not be written, and why the last one could not."""
    failed = [event for event in read_events(record.folder.events) if event["event"] == "save_failed"]
    if not failed:
        return ""
    return f"{len(failed)} failed, the last at step {failed[-1].get('step', '?')}: {failed[-1].get('error', '')}"


def _best(record: Record) -> str:
    """Return the checkpoint that `session(best=...)` keeps, and its value."""
    found = find_best(find_checkpoints(record.folder.path))
    return f"step {found[0]} ({found[1].metric} {found[1].value:.5g})" if found is not None else ""


def _attempt(attempt: AttemptFolder) -> str:
    verdict = read_verdict(attempt.verdict) or "no verdict"
    failure = read_failure(attempt)
    if not failure:
        return verdict
    who = f"rank {failure['rank']}" if failure.get("rank") is not None else "launch"
    where = f"\nat {failure['where']}" if failure.get("where") else ""
    return f"{verdict}: {who} on {failure.get('host', '?')}: {failure_text(failure)}{where}"


def bar(shares: Goodput) -> str:
    """Return the shares as one coloured bar, in rich markup."""
    pieces = []
    for name in SHARES:
        length = round(WIDTH * shares.share(name))
        if length:
            pieces.append(f"[{COLOURS[name]}]{'█' * length}[/]")
    return "".join(pieces)
