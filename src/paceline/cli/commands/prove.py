"""`paceline prove`: check that a script trains the same on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from paceline.cli import console, typer_options
from paceline.contract.rank_records import CHANGES
from paceline.errors import UsageError
from paceline.launch.local_run import LOCAL_STYLES, current_folder, detect_machine
from paceline.launch.run_folder import create_scratch, resolve_scratch
from paceline.spec.job import Job, Program
from paceline.spec.option import OUTPUT, Flag
from paceline.tools.prove.local_runner import LocalRunner, Script, choose_folder
from paceline.tools.prove.proof import Proof, prove
from paceline.tools.prove.records import plan_cases

KERNELS = "runtime.deterministic"  # on GPUs, equal runs differ without it


def _option(*names: str, metavar: str | None = None, help: str, panel: str = "Proof") -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


OPTIONS = {
    "ranks": _option(
        "--ranks",
        metavar="LIST",
        help="Numbers of ranks (default: 1,2,4, up to the number of GPUs).",
    ),
    "styles": _option(
        "--styles",
        metavar="LIST",
        help="Launch styles: fork, torchrun, spawn, lightning, accelerate.",
    ),
    "steps": _option("--steps", metavar="N", help="Training steps of each run."),
    "interrupt": _option(
        "--interrupt/--no-interrupt", help="Also stop a run in the middle, and resume it."
    ),
    "without": _option(
        "--without",
        metavar="dropout|batchnorm",
        help="Turn dropout off, or let BatchNorm normalize each sample by itself, to prove the rest; repeatable.",
    ),
    "tolerance": _option(
        "--tolerance",
        metavar="X",
        help="Largest difference (default: 1e-6 in float64, 1e-4 in fp32, 1e-2 in fp16, 5e-2 in bf16).",
    ),
    "batch_arg": _option(
        "--batch-arg",
        metavar="OPTION",
        help="The script's option for the batch size per rank; its value is divided by the number of ranks.",
    ),
    "output": _option(
        "-o",
        "--output",
        metavar="DIR",
        help="New folder for the runs and all numbers.",
        panel=OUTPUT,
    ),
}


@typer_options.takes_settings("prove", script=True)
def command(
    args: typer_options.ScriptArgs = None,
    *,
    settings: typer_options.Settings,
    module: typer_options.Module = False,
    ranks: Annotated[str | None, OPTIONS["ranks"]] = None,
    styles: Annotated[str, OPTIONS["styles"]] = "fork,torchrun",
    steps: Annotated[int, OPTIONS["steps"]] = 30,
    interrupt: Annotated[bool, OPTIONS["interrupt"]] = True,
    without: Annotated[list[str] | None, OPTIONS["without"]] = None,
    tolerance: Annotated[float | None, OPTIONS["tolerance"]] = None,
    batch_arg: Annotated[str | None, OPTIONS["batch_arg"]] = None,
    output: Annotated[Path | None, OPTIONS["output"]] = None,
) -> int:
    """Train a few steps on 1, 2 and 4 ranks, in several launch styles and with an interruption, and compare.

    The global batch is the same in all runs, so losses and final weights must agree up to rounding, and bit for bit
    for the same number of ranks. If they don't, it names the cause, and the exit code is 1.

    \b
      paceline prove train.py                          a script that uses paceline.session
      paceline prove --ranks 1,2 --steps 100 train.py --lr 0.1
      paceline prove --without dropout train.py        prove the rest of a model with dropout
      paceline prove --batch-arg --bs ddp.py --bs 64   a plain DDP script: --bs 64, --bs 32, --bs 16
    """
    cwd = current_folder()
    program = settings.find_program(args, is_module=module, cwd=cwd, command="prove")
    base = list(settings.flags)

    def load(program: Program, flags: Sequence[Flag] = ()) -> Job:
        return settings.load(program, cwd=cwd, flags=[*base, *flags], here=True)

    job = load(program)
    gpus = 0 if job.runtime.cpu else detect_machine(os.environ).gpus
    if gpus and KERNELS not in job.sources:
        base.append(Flag("--deterministic", KERNELS, True))
    names, changes = [each.strip() for each in styles.split(",")], tuple(without or ())
    _require_known("--styles", names, LOCAL_STYLES)
    _require_known("--without", changes, CHANGES)
    counts = [count for count in (1, 2, 4) if not gpus or count <= gpus]
    numbers = _numbers(ranks) if ranks else counts
    cases = plan_cases(numbers, names, steps=steps, interrupt=interrupt)
    cases = [replace(each, without=changes) for each in cases]
    script = Script(program, batch_arg)
    # find a batch that the ranks cannot share before anything runs
    for case in cases:
        script.arguments(case, Path())
    scratch = resolve_scratch(job, os.environ)
    if output is None:
        create_scratch(scratch)
    folder = choose_folder(output, scratch / job.project_name, program.name)
    runner = LocalRunner(script, load=load, folder=folder)
    try:
        proof = prove(cases, runner, tolerance=tolerance)
    except KeyboardInterrupt:
        console.say_note(f"interrupted, so there is no result; the runs so far are in {folder}")
        raise
    finally:
        runner.remove_weights()
    print_proof(proof)
    console.say_note(f"all numbers: {proof.write(folder)}")
    return 0 if proof.holds else 1


def _require_known(flag: str, values: Sequence[str], known: Sequence[str]) -> None:
    for each in values:
        if each not in known:
            raise UsageError(f'Invalid {flag} "{each}": use some of {", ".join(known)}.')


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(
            f'Invalid --ranks "{text}".', hint="Use numbers and commas: --ranks 1,2,4."
        ) from None


def print_proof(proof: Proof) -> None:
    """Print the table of comparisons, what could not be run, and what broke it."""
    out = console.console()
    table = Table("run", "compared with", box=None, pad_edge=False)
    for name in ("losses", "weights", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in proof.comparisons:
        known = each.loss_step and not each.agrees
        table.add_row(
            console.cell(each.name),
            console.cell(each.against),
            f"{each.loss:.2g}{f' (step {each.loss_step})' if known else ''}",
            "-" if each.weights is None else f"{each.weights:.2g}",
            f"{each.limit:.2g}",
            f"{'[good]✓[/]' if each.agrees else '[bad]✗[/]'} {console.cell(each.note)}",
        )
    out.print(table)
    lines = [
        *(f"[dim]{name}: skipped, {console.cell(why)}[/]" for name, why in proof.skipped.items()),
        f"[dim]Largest differences · {console.cell(' · '.join(proof.facts()))}[/]",
        *(["[good]✓ The training is the same in all runs.[/]"] if proof.holds else []),
    ]
    for cause in proof.causes:
        lines.append(f"[bad]✗ What broke it: {console.cell(cause.name)}.[/]")
        lines += [f"  {console.cell(cause.evidence)}", f"  {console.cell(cause.fix)}"]
    for line in lines:
        out.print(line, soft_wrap=True)
