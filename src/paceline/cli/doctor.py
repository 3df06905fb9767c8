"""`paceline doctor`: find problems on this machine, or of a job before it is queued."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options
from paceline.cluster.checks.findings import GOOD, PROBLEM, WARNING, Finding, worst
from paceline.spec.option_table import LAUNCH, PROJECT, RESOURCES

MARKS = {GOOD: ("✓", "good"), WARNING: ("!", "yellow"), PROBLEM: ("✗", "bad")}


@options.takes_settings("doctor", script=True, shown=(RESOURCES, LAUNCH, PROJECT))
def command(
    args: options.ScriptArgs = None,
    *,
    settings: options.Settings,
    is_job: Annotated[bool, typer.Option("--job", help="Check a job, as `paceline submit` does.")] = False,
    module: options.Module = False,
) -> int:
    """Check this machine and its Slurm, or a job before you submit it.

    All settings of `paceline submit` work here too.

    \b
      paceline doctor                            this machine and its Slurm
      paceline doctor --job --gpus 4 train.py    a job: its script, imports, limits and start time
    """
    if is_job or args:
        from paceline.cluster.slurm.draft import Draft

        cwd = Path.cwd()
        job = settings.load(options.find_program(args, is_module=module, cwd=cwd), cwd=cwd)
        return report(Draft(job).findings())
    from paceline.cluster.checks.machine import inspect_machine, inspect_slurm
    from paceline.cluster.runs.folder import resolve_scratch
    from paceline.cluster.secrets.secrets import inspect_secrets
    from paceline.spec import Program

    job = settings.load(Program(""))
    machine = inspect_machine(os.environ, resolve_scratch(job, os.environ))
    return report([*machine, inspect_secrets(job, os.environ), *inspect_slurm()])


def report(findings: Sequence[Finding]) -> int:
    """Print one line per finding; return 1 if one is a problem."""
    out = console.console()
    for finding in findings:
        mark, colour = MARKS[finding.level]
        out.print(f"[{colour}]{mark}[/] [dim]{finding.about:<11}[/] ", end="")
        out.print(finding.text, markup=False, soft_wrap=True)
        if finding.hint:
            out.print(f"              {finding.hint}", markup=False, soft_wrap=True)
    return 1 if worst(findings) == PROBLEM else 0
