"""`paceline inspect`: look at what a script does, without training it to the end."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import console, typer_options
from paceline.cli.commands.doctor import report
from paceline.cli.parser import GroupedCommand, make_group
from paceline.launch.local_run import current_folder
from paceline.spec.findings import PROBLEM
from paceline.spec.option import LAUNCH, TRAINING
from paceline.tools.inspect.recorded_run import overrides, record
from paceline.tools.inspect.samples import Samples, check_samples

app = make_group("See which samples each rank gets.")
SHOWN_STEPS, SHOWN_KEYS = 3, 8
WITHOUT = ("launch.warm", "runtime.profile", "runtime.system_metrics")  # nothing of the run stays


@app.command(cls=GroupedCommand, context_settings={"allow_interspersed_args": False})
@typer_options.takes_settings("run", script=True, shown=(LAUNCH, TRAINING), without=WITHOUT)
def data(
    args: typer_options.ScriptArgs = None,
    *,
    settings: typer_options.Settings,
    module: typer_options.Module = False,
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
    """Show which rank gets which samples, and check two epochs: every sample once, in a different order each time.

    Runs your script on this machine's CPU, in a folder that is removed afterwards. Loaders of run.loader are read
    without training, and of a map-style dataset only the first items are loaded. A script with its own DataLoader
    trains for two epochs: pass arguments that make them short. The loader that is checked is the one whose steps
    call backward().

    \b
      paceline inspect data train.py                 two ranks
      paceline inspect data --nproc 4 train.py       four ranks; arguments of the script follow it
      paceline inspect data --limit 100 stream.py    the first 100 steps of each epoch
    """
    cwd = current_folder()
    program = settings.find_program(args, is_module=module, cwd=cwd, command="inspect data")
    with tempfile.TemporaryDirectory(prefix="paceline-inspect-") as name:
        folder = Path(name)
        job = settings.load(
            program, cwd=cwd, flags=[*settings.flags, *overrides(folder)], here=True
        )
        with console.console(stderr=True).status(f"reading two epochs of {program.name}"):
            samples = record(job, folder, limit or 0)
    findings = check_samples(samples)
    if not as_json:
        _print_samples(samples)
        return report(findings)
    ranks = [
        {"facts": asdict(rank.facts), "batches": list(rank.batches.values())}
        for rank in samples.ranks
    ]
    console.print_json(ranks=ranks, findings=[asdict(finding) for finding in findings])
    return int(any(each.level == PROBLEM for each in findings))


def _print_samples(samples: Samples) -> None:
    facts, out = samples.facts, console.console()
    size = "a stream" if facts.samples is None else f"{facts.samples:,} samples"
    scope = "of all ranks" if facts.kind == "run.loader" else "per rank"
    batch = f", batch size {facts.batch_size} {scope}" if facts.batch_size else ""
    workers = f", {facts.num_workers} workers each" if facts.num_workers else ""
    text = f"{facts.kind} of {facts.dataset}: {size}{batch}, {facts.world_size} ranks{workers}"
    out.print(console.printable(text), markup=False)
    table = Table("step", "rank", box=None, pad_edge=False, header_style="dim")
    table.add_column("samples", overflow="ellipsis", no_wrap=True)
    for step in range(SHOWN_STEPS):
        for rank in samples.ranks:
            keys = rank.batches.get((0, step), {"keys": []})["keys"]
            shown = " ".join(console.cell(key) for key in keys[:SHOWN_KEYS])
            more = f" … ({len(keys)})" if len(keys) > SHOWN_KEYS else ""
            table.add_row(str(step), str(rank.facts.rank), shown + more)
    out.print(table)
