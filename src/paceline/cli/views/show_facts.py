"""The facts of a run that `paceline show` prints: what was requested, and its status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.score import find_best
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.quote import command_line
from paceline.contract.stop.framework_presets import PRESETS, describe_contract
from paceline.contract.typed_command import type_again
from paceline.contract.verdict import DONE, FAILED, STOPPED_EXIT
from paceline.slurm.sbatch import known_jobs
from paceline.spec.quantities import brief_seconds, show_seconds
from paceline.watch import origin
from paceline.watch.details import flatten, read_config
from paceline.watch.events import describe_start_phases, read_events
from paceline.watch.failure import describe_start, resume_command
from paceline.watch.latest import describe_throughput
from paceline.watch.overview import Overview
from paceline.watch.records import Record

Events = Sequence[dict[str, Any]]
Fact = tuple[str, str]


def state_facts(record: Record, overview: Overview) -> list[Fact]:
    """Return how a run stands: the most important first."""
    events = read_events(record.folder.events)
    return _known(
        ("run", record.folder.key),
        ("name", str(record.details.get("name", ""))),
        (
            "status",
            f"{record.status}{_ago(record)}{f' ({overview.detail})' if overview.detail else ''}",
        ),
        ("hint", record.hint),
        ("why", _why(record, events)),
        ("step", _progress(overview)),
        ("speed", "" if record.is_waiting else describe_throughput(record.folder.metrics)),
        ("saves", _failed_saves(events)),
    )


def asked_facts(record: Record) -> list[Fact]:
    """Return what was asked for, and where it is."""
    details = record.details
    code = details.get("code") or {}
    commit = str(code.get("commit") or "")[:10]
    events = read_events(record.folder.events)
    return _known(
        ("job", _jobs(record)),
        ("ranks", _ranks(record, events)),
        ("stop", _stop(record, events)),
        ("command", _command(details)),
        ("script", _script(details)),
        ("earlier", "\n".join(_command(each) for each in _earlier(details))),
        ("config", _config(record)),
        ("code", f"{commit}{' + changes' if code.get('changed') else ''}"),
        ("folder", origin.place(record.folder.path)),
        ("files", _files(record, events)),
        ("start", describe_start_phases(events)),
        ("best", _best(record)),
    )


def command_facts(record: Record, commands: dict[str, str]) -> list[Fact]:
    """Return what to type next."""
    resume = (
        resume_command(record.folder, job=record.job)
        if record.is_over and record.status != DONE
        else ""
    )
    if resume:
        resume += f"  ({describe_start(record.folder)})"
    return _known(
        ("continue", resume),
        ("repeat", commands.get("repeat", "")),
        ("logs", commands.get("logs", "")),
        ("fetch", commands.get("fetch", "")),
        ("cancel", commands.get("cancel", "")),
    )


def _ago(record: Record) -> str:
    """Return how long ago a run had its status, if there is no connection to its cluster now."""
    age = 0.0 if record.is_over else origin.age()
    return f" {brief_seconds(age)} ago" if age else ""


def _known(*facts: Fact) -> list[Fact]:
    return [(name, text) for name, text in facts if text]


def _progress(overview: Overview) -> str:
    if overview.step is None:
        return ""
    parts = [str(overview.step)]
    if overview.total_steps:
        parts[0] += (
            f" of {overview.total_steps} ({min(1.0, overview.step / overview.total_steps):.0%})"
        )
    if overview.seconds_left is not None:
        parts.append(f"{show_seconds(overview.seconds_left)} left")
    if overview.loss is not None:
        parts.append(f"{overview.loss_name} {overview.loss:.4g}")
    return " · ".join(parts)


def _command(start: dict[str, Any]) -> str:
    """Return what was typed to start a run, or to go on with it."""
    return type_again(start)


def _script(details: dict[str, Any]) -> str:
    """Return what a run that goes on runs now: its newest command need not name the script."""
    if not _earlier(details):
        return ""
    module = ("-m",) if details.get("is_module") is True else ()
    return command_line(
        [*module, str(details.get("program", "")), *map(str, details.get("args", []))]
    )


def _earlier(details: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in details.get("earlier", []) if isinstance(each, dict)]


def _config(record: Record) -> str:
    """Return what the script has passed to run.config."""
    return " ".join(
        f"{name}={json.dumps(value)}" for name, value in flatten(read_config(record.folder)).items()
    )


def _jobs(record: Record) -> str:
    """Return the run's newest job, and those that it had before."""
    if record.job is None:
        return ""
    before = [job for job in known_jobs(record.folder) if job != record.job]
    return f"{record.job} (earlier: {', '.join(before)})" if before else record.job


def _ranks(record: Record, events: Events) -> str:
    details = record.details
    style = f"{details.get('style', '?')} style"
    for event in events:
        if event["event"] == "independent" and event.get("attempt") == record.attempts:
            processes = int(event.get("processes", 0))
            return (
                f"{processes} independent processes ({style})"
                if processes > 1
                else f"1 process ({style})"
            )
    return (
        f"{_count(details.get('nodes'), 'node')} x {_count(details.get('nproc'), 'rank')} ({style})"
    )


def _count(number: object, noun: str) -> str:
    return f"{'?' if number is None else number} {noun}{'s' * (number != 1)}"


def _stop(record: Record, events: Events) -> str:
    """Return how a script without the runtime is asked to stop, if that is set or its framework has a preset."""
    try:
        spec = LaunchSpec.from_json(record.folder.launch_spec.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    names = [event.get("name") for event in events if event["event"] == "framework"]
    preset = next((preset for preset in PRESETS if names and preset.name == names[-1]), None)
    if preset is None and not spec.stop_signal and spec.saved_exit_code == STOPPED_EXIT:
        return ""
    return describe_contract(spec.stop_signal, spec.saved_exit_code, preset)


def _why(record: Record, events: Events) -> str:
    """Return why a failed run did not start its ranks; each attempt shows its own failure."""
    if record.status != FAILED:
        return ""
    reasons = [str(event["reason"]) for event in events if event.get("reason")]
    return reasons[-1] if reasons else ""


def _files(record: Record, events: Events) -> str:
    """Return the working directory of a submitted run and, once it is over, what the script has written there."""
    path = record.folder.work / Path(str((record.details.get("code") or {}).get("folder", ""))).name
    if not path.is_dir():
        return ""
    names = [event.get("names", []) for event in events if event["event"] == "files"]
    return f"{path}{': ' + ', '.join(map(str, names[-1])) if names else ''}"


def _failed_saves(events: Events) -> str:
    """Return how many checkpoints could not be written, and why the last one could not."""
    failed = [event for event in events if event["event"] == "save_failed"]
    if not failed:
        return ""
    return f"{len(failed)} failed, the last at step {failed[-1].get('step', '?')}: {failed[-1].get('error', '')}"


def _best(record: Record) -> str:
    """Return the checkpoint that `session(best=...)` keeps, and its value."""
    found = find_best(find_checkpoints(record.folder.path))
    return f"step {found[0]} ({found[1].metric} {found[1].value:.5g})" if found is not None else ""
