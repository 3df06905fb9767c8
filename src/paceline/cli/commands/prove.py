"""`paceline prove`: check that a script trains the same on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, typer_options
from paceline.errors import UsageError
from paceline.spec.option import OUTPUT

if TYPE_CHECKING:
    from paceline.spec.job import Job, Program
    from paceline.spec.typed_flags import Flag
    from paceline.tools.prove.cases import Case
    from paceline.tools.prove.comparison import Comparison
    from paceline.tools.prove.local_runner import Script
    from paceline.tools.prove.proof import Proof, Request

PROOF = "Proof"
DEFAULT_STEPS = 30
KERNELS = "runtime.deterministic"  # on GPUs, equal runs differ without it


def _option(*names: str, metavar: str | None = None, help: str, panel: str = PROOF) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


Ranks = Annotated[
    str | None,
    _option(
        "--ranks",
        metavar="LIST",
        help="Numbers of ranks (default: 1,2,4, up to the number of GPUs).",
    ),
]
Styles = Annotated[
    str,
    _option(
        "--styles",
        metavar="LIST",
        help="Launch styles: fork, torchrun, spawn, lightning, accelerate.",
    ),
]
Steps = Annotated[int, _option("--steps", metavar="N", help="Training steps of each run.")]
Interrupt = Annotated[
    bool,
    _option("--interrupt/--no-interrupt", help="Also stop a run in the middle, and resume it."),
]
Without = Annotated[
    list[str] | None,
    _option(
        "--without",
        metavar="dropout|batchnorm",
        help="Turn dropout off, or let BatchNorm use statistics of all ranks, to prove the rest; repeatable.",
    ),
]
Tolerance = Annotated[
    float | None,
    _option(
        "--tolerance",
        metavar="X",
        help="Largest difference (default: 1e-6 in float64, 1e-4 in fp32, 1e-2 in fp16, 5e-2 in bf16).",
    ),
]
Metric = Annotated[
    str | None,
    _option(
        "--metric",
        metavar="NAME",
        help="Metric to compare, by the name you log it under (default: loss, or the loss that you call backward()"
        " on).",
    ),
]
Metrics = Annotated[
    str | None,
    _option(
        "--metrics",
        metavar="FILE",
        help="JSON Lines file to which the script writes its loss; may contain {folder}.",
    ),
]
BatchArg = Annotated[
    str | None,
    _option(
        "--batch-arg",
        metavar="OPTION",
        help="The script's option for the batch size per rank; its value is divided by the number of ranks.",
    ),
]
Output = Annotated[
    Path | None,
    _option("-o", "--output", metavar="DIR", help="New folder for the report.", panel=OUTPUT),
]


@typer_options.takes_settings("prove", script=True)
def command(
    args: typer_options.ScriptArgs = None,
    *,
    settings: typer_options.Settings,
    module: typer_options.Module = False,
    ranks: Ranks = None,
    styles: Styles = "fork,torchrun",
    steps: Steps = DEFAULT_STEPS,
    interrupt: Interrupt = True,
    without: Without = None,
    tolerance: Tolerance = None,
    metric: Metric = None,
    metrics: Metrics = None,
    batch_arg: BatchArg = None,
    output: Output = None,
) -> int:
    """Train a few steps on 1, 2 and 4 ranks, in several launch styles and with an interruption, and compare.

    The global batch is the same in all runs, so losses and final weights must agree up to rounding, and bit for bit
    for the same number of ranks. If they don't, the report names the cause, and the exit code is 1.

    \b
      paceline prove train.py                          a script that uses paceline.session
      paceline prove --ranks 1,2 --steps 100 train.py --lr 0.1
      paceline prove --without dropout train.py        prove the rest of a model with dropout
      paceline prove --batch-arg --bs ddp.py --bs 64   a plain DDP script: --bs 64, --bs 32, --bs 16
    """
    from paceline.launch.machine import current_folder
    from paceline.spec.typed_flags import Flag
    from paceline.tools.prove.local_runner import Script

    cwd = current_folder()
    program = settings.find_program(args, is_module=module, cwd=cwd, command="prove")

    base = list(settings.flags)

    def load(program: Program, flags: Sequence[Flag] = ()) -> Job:
        return settings.load(program, cwd=cwd, flags=[*base, *flags], here=True)

    from paceline.tools.prove.proof import Request

    job = load(program)
    gpus = _count_gpus(job)
    if gpus and KERNELS not in job.sources:
        base.append(Flag("--deterministic", KERNELS, True))
    cases = _cases(gpus, ranks, styles, steps=steps, interrupt=interrupt)
    request = Request(cases, metric, metrics is not None, tolerance, _changes(without))
    script = Script(program, batch_arg, metrics)
    # find a batch that the ranks cannot share before anything runs
    for case in request.cases:
        script.arguments(case, Path())
    return _prove(request, script, load, output)


def _prove(request: Request, script: Script, load: Any, output: Path | None) -> int:
    from paceline.launch.run_folder import create_scratch, resolve_scratch
    from paceline.tools.prove.local_runner import LocalRunner, choose_folder
    from paceline.tools.prove.proof import Prover
    from paceline.tools.prove.report import write_report

    job, program = load(script.program), script.program
    scratch = resolve_scratch(job, os.environ)
    if output is None:
        create_scratch(scratch)
    folder = choose_folder(output, scratch / job.project_name, program.name)
    progress = ProofProgress(request)
    runner = LocalRunner(script, load=load, folder=folder, progress=progress.show)
    try:
        proof = Prover(request, runner, tell=console.say_note, skip=progress.skip).prove()
        report = write_report(proof, folder, title=" ".join([program.name, *program.args]))
    except KeyboardInterrupt:
        console.say_note(f"interrupted, so there is no result; the runs so far are in {folder}")
        raise
    finally:
        runner.remove_weights()
    print_proof(proof)
    console.say_note(f"report: {report}")
    return 0 if proof.holds else 1


def _count_gpus(job: Job) -> int:
    from paceline.launch.machine import detect_machine

    return 0 if job.runtime.cpu else detect_machine(os.environ).gpus


def _cases(gpus: int, ranks: str | None, styles: str, *, steps: int, interrupt: bool) -> Any:
    from paceline.launch.local_plan import LOCAL_STYLES
    from paceline.tools.prove.cases import plan_cases

    counts = (
        _numbers(ranks) if ranks else [count for count in (1, 2, 4) if not gpus or count <= gpus]
    )
    names = [each.strip() for each in styles.split(",") if each.strip()]
    for name in names:  # before there is a folder
        if name not in LOCAL_STYLES:
            raise UsageError(f'Invalid --styles "{name}": use some of {", ".join(LOCAL_STYLES)}.')
    return tuple(plan_cases(counts, names, steps=steps, interrupt=interrupt))


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(
            f'Invalid --ranks "{text}".', hint="Use numbers and commas: --ranks 1,2,4."
        ) from None


def _changes(without: Sequence[str] | None) -> tuple[str, ...]:
    from paceline.contract.proof_spec import CHANGES

    for each in without or ():
        if each not in CHANGES:
            raise UsageError(
                f'Invalid --without "{each}".', hint=f"Use one of {', '.join(CHANGES)}."
            )
    return tuple(without or ())


# -- what it prints --------------------------------------------------------------------------------


class ProofProgress:
    """Says which run begins."""

    def __init__(self, request: Request) -> None:
        self._total = len(request.cases)
        self._number = 0

    def show(self, case: Case) -> None:
        self._number += 1
        console.say_note(f"run {self._number} of {max(self._number, self._total)}: {case.name}")

    def skip(self, count: int) -> None:
        """Expect fewer runs."""
        self._total -= count


def print_proof(proof: Proof) -> None:
    """Print the table of comparisons, what could not be run, and what broke it."""
    from rich.table import Table

    out = console.console()
    table = Table(box=None, pad_edge=False)
    for name in ("run", "compared with"):
        table.add_column(name)
    for name in ("losses", "weights", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in proof.comparisons:
        table.add_row(*_row(each))
    out.print(table)
    for name, reason in proof.skipped.items():
        out.print(f"[dim]{console.cell(name)}: skipped, {console.cell(reason)}[/]", soft_wrap=True)
    out.print(
        f"[dim]Largest differences · {console.cell(' · '.join(proof.facts()))}[/]", soft_wrap=True
    )
    if proof.holds:
        out.print("[good]✓ The training is the same in all runs.[/]")
    for cause in proof.causes:
        out.print(f"[bad]✗ What broke it: {console.cell(cause.name)}.[/]", soft_wrap=True)
        out.print(f"  {console.cell(cause.evidence)}", soft_wrap=True)
        out.print(f"  {console.cell(cause.fix)}", soft_wrap=True)


def _row(each: Comparison) -> tuple[str, ...]:
    ok = "[good]✓[/]" if each.agrees else "[bad]✗[/]"
    loss = _number(each.loss) + (
        "" if each.agrees or not each.loss_step else f" (step {each.loss_step})"
    )
    weights = "-" if each.weights is None else _number(each.weights)
    note = f"{ok} {console.cell(each.note)}" if each.note else ok
    return (
        console.cell(each.name),
        console.cell(each.against),
        loss,
        weights,
        _number(each.limit),
        note,
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
