"""`paceline inspect`: look at what a script does, without training it to the end."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import console, typer_options
from paceline.cli.commands.doctor import report
from paceline.cli.parser import GroupedCommand
from paceline.contract.rank_records import LoaderFacts
from paceline.launch.local_run import current_folder
from paceline.spec.findings import PROBLEM, worst
from paceline.spec.option import LAUNCH, TRAINING, Flag
from paceline.tools.inspect.sample_checks import check_samples
from paceline.tools.inspect.samples import Request, Samples, overrides, record

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="See which samples each rank gets.",
)
SHOWN_KEYS = 8
WITHOUT = ("launch.warm", "runtime.profile", "runtime.system_metrics")  # nothing of the run stays


@app.callback()
def group() -> None:
    """See which samples each rank gets."""


@app.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@typer_options.takes_settings("run", script=True, shown=(LAUNCH, TRAINING), without=WITHOUT)
def data(
    args: typer_options.ScriptArgs = None,
    *,
    settings: typer_options.Settings,
    module: typer_options.Module = False,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Show the first N steps.")
    ] = 3,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs", metavar="N", min=1, help="Read N epochs, and compare their orders."
        ),
    ] = 2,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Read only N steps of each epoch, e.g. for endless data.",
        ),
    ] = None,
    as_json: typer_options.AsJson = False,
) -> int:
    """Show which rank gets which samples, and check full epochs: every sample once, in a different order each time.

    Runs your script on this machine's CPU, in a folder that is removed afterwards. Loaders of run.loader are read
    without training, and of a map-style dataset only the first items are loaded. A script with its own DataLoader
    trains for that many epochs (two, unless you set --epochs): pass arguments that make them short. The loader
    that is checked is the one whose batches reach backward().

    \b
      paceline inspect data train.py                 two ranks
      paceline inspect data --nproc 4 train.py       four ranks; arguments of the script follow it
      paceline inspect data --limit 100 stream.py    the first 100 steps of each epoch
    """
    cwd = current_folder()
    program = settings.find_program(args, is_module=module, cwd=cwd, command="inspect data")
    request = Request(program, epochs, limit)
    with tempfile.TemporaryDirectory(prefix="paceline-inspect-") as name:
        folder = Path(name)
        flags = [*settings.flags, *overrides(folder)]
        if not any(flag.key == "runtime.cpu" for flag in flags):
            flags.append(Flag("--cpu", "runtime.cpu", True))
        job = settings.load(request.recorder(folder, cwd), cwd=cwd, flags=flags, here=True)
        with console.console(stderr=True).status(f"reading {epochs} epochs of {program.name}"):
            samples = record(job, folder, ["paceline", *sys.argv[1:]])
    findings = check_samples(samples)
    if as_json:
        ranks = [{**asdict(rank), "ended": sorted(rank.ended)} for rank in samples.ranks]
        console.print_json(ranks=ranks, findings=[asdict(finding) for finding in findings])
        return int(worst(findings) == PROBLEM)
    _print_samples(samples, steps)
    return report(findings)


def _describe(facts: LoaderFacts) -> str:
    size = f"{facts.samples:,} samples" if facts.samples is not None else "a stream"
    scope = "of all ranks" if facts.kind == "run.loader" else "per rank"
    batch = f", batch size {facts.batch_size} {scope}" if facts.batch_size else ""
    return console.printable(f"{facts.kind} of {facts.dataset}: {size}{batch}")


def _print_samples(samples: Samples, steps: int) -> None:
    facts, out = samples.facts, console.console()
    workers = f", {facts.num_workers} workers each" if facts.num_workers else ""
    out.print(f"{_describe(facts)}, {facts.world_size} ranks{workers}", markup=False)
    for other in samples.others:
        out.print(f"not checked: {_describe(other)}", markup=False)
    table = Table("step", "rank", "worker", box=None, pad_edge=False, header_style="dim")
    table.add_column("samples", overflow="ellipsis", no_wrap=True)
    for rank, batch in samples.epochs[0].batches():
        if batch.step >= steps:
            break
        step = f"{batch.step}.{batch.micro}" if facts.accumulate > 1 else str(batch.step)
        shown = " ".join(console.cell(key) for key in batch.keys[:SHOWN_KEYS])
        more = f" … ({len(batch.keys)})" if len(batch.keys) > SHOWN_KEYS else ""
        worker = "-" if batch.worker is None else str(batch.worker)
        table.add_row(step, str(rank), worker, shown + more)
    out.print(table)
