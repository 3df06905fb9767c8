"""`paceline doctor`: find problems on this machine, of a job before it is queued, or of a run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options, runs
from paceline.cluster.checks.findings import GOOD, PROBLEM, WARNING, Finding, worst
from paceline.spec.option_table import LAUNCH, PROJECT, RESOURCES

MARKS = {GOOD: ("✓", "good"), WARNING: ("!", "yellow"), PROBLEM: ("✗", "bad")}
INDENT = " " * 14


@options.takes_settings("doctor", script=True, shown=(RESOURCES, LAUNCH, PROJECT))
def command(
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN | SCRIPT [ARGS]...]", help="A run; or your script and its arguments."),
    ] = None,
    *,
    settings: options.Settings,
    is_job: Annotated[bool, typer.Option("--job", help="Check a job, as `paceline submit` does.")] = False,
    module: options.Module = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Find out why a run hangs, is slow or died; or check this machine, or a job before you submit it.

    For a run, it reads the run folder. Each finding has its evidence and what to do about it. All settings of
    `paceline submit` work for a job.

    \b
      paceline doctor last                       the newest run: who has not arrived, what is slow, why it died
      paceline doctor 1a2b --json                the same as JSON
      paceline doctor                            this machine and its Slurm
      paceline doctor --job --gpus 4 train.py    a job: its script, imports, limits and start time
    """
    if args and not is_job and not module and names_a_run(args):
        as_json |= "--json" in args[1:]  # options end at the first argument, which may be a script
        return report(diagnose_run(args[0]), as_json=as_json)
    if is_job or args:
        from paceline.cluster.slurm.draft import Draft

        cwd = Path.cwd()
        job = settings.load(options.find_program(args, is_module=module, cwd=cwd), cwd=cwd)
        return report(Draft(job).findings(), as_json=as_json)
    from paceline.cluster.checks.machine import inspect_machine, inspect_slurm
    from paceline.cluster.runs.folder import resolve_scratch
    from paceline.cluster.secrets.secrets import inspect_secrets
    from paceline.spec import Program

    job = settings.load(Program(""))
    machine = inspect_machine(os.environ, resolve_scratch(job, os.environ))
    return report([*machine, inspect_secrets(job, os.environ), *inspect_slurm()], as_json=as_json)


def names_a_run(args: Sequence[str]) -> bool:
    """Whether the arguments name a run: a script is a file, and may have arguments of its own."""
    more = [each for each in args[1:] if each != "--json"]
    return not more and not args[0].endswith(".py") and not Path(args[0]).is_file()


def diagnose_run(name: str) -> list[Finding]:
    from paceline.watch.diagnosis.diagnosis import diagnose
    from paceline.watch.diagnosis.evidence import read_evidence
    from paceline.watch.records import read_record

    record = read_record(runs.named(name))
    run = Finding("run", GOOD, f"{record.run_id} is {record.status}")
    found = diagnose(read_evidence(record))
    if all(each.level == GOOD for each in found):
        run = dataclasses.replace(run, text=f"{run.text}; nothing wrong was found")
    return [run, *found]


def report(findings: Sequence[Finding], *, as_json: bool = False) -> int:
    """Print the findings; return 1 if one is a problem."""
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=1, ensure_ascii=False))
    else:
        draw(findings)
    return 1 if worst(findings) == PROBLEM else 0


def draw(findings: Sequence[Finding]) -> None:
    """Print a line per finding; below it the evidence, what to do, and where to read more."""
    out = console.console()
    for finding in findings:
        mark, colour = MARKS[finding.level]
        out.print(f"[{colour}]{mark}[/] [dim]{console.cell(finding.about):<11}[/] ", end="")
        out.print(console.printable(finding.text), markup=False, soft_wrap=True)
        for fact in finding.evidence:
            out.print(f"{INDENT}- {console.printable(fact)}", markup=False, soft_wrap=True)
        if finding.hint:
            hint = f"Fix: {finding.hint}" if finding.evidence else finding.hint
            out.print(f"{INDENT}{console.printable(hint)}", markup=False, soft_wrap=True)
        if finding.docs:
            out.print(f"{INDENT}See {finding.docs}", markup=False, soft_wrap=True)
