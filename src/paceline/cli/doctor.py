"""`paceline doctor`: what is wrong here, before the queue finds it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, options, runs
from paceline.cluster.checks.finding import GOOD, PROBLEM, Finding, worst
from paceline.cluster.checks.machine import inspect_machine, inspect_slurm
from paceline.cluster.secrets.secrets import inspect_secrets
from paceline.cluster.slurm.submission import Draft
from paceline.spec import Program, load_job

MARKS = {GOOD: ("✓", "good"), "warning": ("!", "yellow"), PROBLEM: ("✗", "bad")}


@options.takes_a_script
def command(
    words: options.Words = None,
    *,
    is_job: Annotated[bool, typer.Option("--job", help="Check a job, as `paceline submit` would.")] = False,
    module: options.Module = False,
    nodes: Annotated[int | None, typer.Option("--nodes", help="How many nodes.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs on each node.")] = None,
    gpu_type: Annotated[str | None, typer.Option("--gpu-type", help="Their model.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="The time limit.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="The partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="The account.")] = None,
    style: options.Style = None,
    config: options.Config = None,
    cluster_profile: options.ClusterProfile = None,
) -> int:
    """What is here, and what is wrong with it.

    \b
    paceline doctor                            this machine, and its Slurm
    paceline doctor --job --gpus 4 train.py    a job: script, imports, limits, start estimate
    """
    if not is_job and not words:
        here = load_job(Program(""))
        return report(
            [
                *inspect_machine(os.environ, runs.scratch_here()),
                inspect_secrets(here, os.environ),
                *inspect_slurm(),
            ]
        )
    flags = options.flags_of(
        nodes=nodes, gpus=gpus, gpu_type=gpu_type, time=time, partition=partition, account=account,
        style=style,
    )  # fmt: skip
    program = options.find_program(words, is_module=module, cwd=Path.cwd())
    job = load_job(program, flags=flags, config=config, profile=cluster_profile)
    return report(Draft(job).findings())


def report(found: Sequence[Finding]) -> int:
    """One line each; 1 when something cannot work."""
    out = console.console()
    for each in found:
        mark, colour = MARKS[each.level]
        out.print(f"[{colour}]{mark}[/] [dim]{each.about:<11}[/] ", end="")
        out.print(each.text, markup=False, soft_wrap=True)
        if each.hint:
            out.print(f"              {each.hint}", markup=False, soft_wrap=True)
    return 1 if worst(found) == PROBLEM else 0
