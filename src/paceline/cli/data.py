"""`paceline data`: what `[data]` stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.agent.staging.copy.progress import shown
from paceline.agent.staging.copy.transfer import Transfer
from paceline.agent.staging.folders import format_size
from paceline.agent.staging.packs import Packs
from paceline.agent.staging.stage import ScannedItem, look, notes_on
from paceline.agent.staging.stage import make_packs as pack_all
from paceline.cli import console, options
from paceline.cluster.checks.data import staging_request
from paceline.cluster.runs.folder import resolve_scratch
from paceline.errors import UsageError
from paceline.spec import Flag, Program, load_job

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    help="Data that runs copy to the nodes' own disks.",
)  # fmt: skip


@app.callback()
def group() -> None:
    """Data that runs copy to the nodes' own disks."""


@app.command()
def stage(
    paths: Annotated[
        list[str] | None, typer.Argument(help="What to look at; else what [data] stage says.")
    ] = None,
    *,
    config: options.Config = None,
    cluster_profile: options.ClusterProfile = None,
) -> int:
    """Look at what would be staged, and pack its small files now, so that no job has to.

    \b
    paceline data stage               what [data] of paceline.toml names
    paceline data stage images        <scratch>/<project>/images
    """
    flags = [Flag("PATHS", "data.stage", paths or None)]
    job = load_job(Program(""), flags=flags, config=config, profile=cluster_profile, cwd=Path.cwd())
    wish = staging_request(job, scratch=resolve_scratch(job, os.environ), environ=os.environ)
    if not wish.items:
        raise UsageError(
            "there is nothing to stage", hint="name paths, or set stage in [data] of paceline.toml"
        )
    packs = Packs(wish.packs)
    planned = look(wish, packs)
    for each in planned:
        print(f"{each.name}: {_told(each)}")
    for note in notes_on(planned):
        console.say_note(note)
    copying = Transfer()
    with shown("packing", copying, say=console.say_note):
        made = pack_all(planned, packs, copying)
    print(f"packed {made} of them into {wish.packs}" if made else "there is nothing left to pack")
    return 0


def _told(planned: ScannedItem) -> str:
    manifest = planned.manifest
    small = len(manifest.small())
    return f"{len(manifest.files)} files ({small} small), {format_size(manifest.size)}"
