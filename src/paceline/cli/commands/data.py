"""`paceline data`: the data that runs stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, typer_options
from paceline.cli.commands import data_push
from paceline.cli.parser import GroupedCommand
from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.checks.data import staging_request
from paceline.launch.run_folder import resolve_scratch
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.typed_flags import Flag
from paceline.staging.copy import Transfer
from paceline.staging.packs import Packs
from paceline.staging.stager import ScannedItem, scan_items

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Send data to a cluster, and prepare the data that runs stage to the nodes' disks.",
)


@app.callback()
def group() -> None:
    """Send data to a cluster, and prepare the data that runs stage to the nodes' disks."""


@app.command(cls=GroupedCommand)
def stage(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH", help="Paths to stage [default: stage in [data] of paceline.toml]."
        ),
    ] = None,
    *,
    config: typer_options.Config = None,
    cluster_profile: typer_options.ClusterProfile = None,
) -> int:
    """Show what a run would stage, and pack its small files now, so that no job has to.

    \b
      paceline data stage               what [data] of paceline.toml lists
      paceline data stage images        <scratch>/<project>/images
    """
    flags = [Flag("PATHS", "data.stage", paths or None)]
    job = load_job(
        Program(""),
        flags=flags,
        config=config,
        profile=cluster_profile,
        cwd=Path.cwd(),
        cluster=typer_options.this_cluster(),
    )
    request = staging_request(job, scratch=resolve_scratch(job, os.environ), environ=os.environ)
    if not request.items:
        raise UsageError(
            "Nothing to stage.", hint="Name paths, or set stage in [data] of paceline.toml."
        )
    items = scan_items(request)
    for item in items:
        files, small = len(item.manifest.files), len(item.manifest.small)
        print(f"{item.name}: {files} files ({small} small), {show_size(item.manifest.size)}")
        for note in item.notes():
            console.say_note(note)
    count = _pack(items, Packs(request.packs))
    print(f"packed {count} of them into {request.packs}" if count else "nothing left to pack")
    return 0


def _pack(items: list[ScannedItem], packs: Packs) -> int:
    """Write the packs that are missing, and return how many."""
    unpacked = [
        item.manifest for item in items if item.manifest.needs_pack and not packs.has(item.manifest)
    ]
    for number, manifest in enumerate(unpacked, start=1):
        size = show_size(sum(file.size for file in manifest.small))
        console.say_note(f"packing {number} of {len(unpacked)}: {manifest.source}, {size}")
        try:
            packs.write(manifest, Transfer())
        except OSError as error:
            raise EnvironmentProblem(
                f"Cannot pack {manifest.source!r}: {error.strerror}.",
                hint="The scratch folder needs free space for a second copy of the small files.",
            ) from None
    return len(unpacked)


app.command(cls=GroupedCommand, name="push")(data_push.command)
