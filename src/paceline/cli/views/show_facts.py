"""The facts of a run that `paceline show` prints: what was requested, and its status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint.marker import find_checkpoints
from paceline.contract.checkpoint.score import find_best
from paceline.contract.framework_presets import PRESETS, describe_contract
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.quote import command_line
from paceline.contract.typed_command import type_again
from paceline.contract.verdict import FAILED, STOPPED_EXIT
from paceline.slurm.sbatch import known_jobs
from paceline.spec.quantities import brief_seconds, show_seconds
from paceline.watch import origin
from paceline.watch.details import flatten, read_config
from paceline.watch.events import describe_start_phases
from paceline.watch.failure import describe_start
from paceline.watch.latest import describe_throughput
from paceline.watch.overview import Overview
from paceline.watch.records import Record

Fact = tuple[str, str]


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
