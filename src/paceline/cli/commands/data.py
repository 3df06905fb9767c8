"""`paceline data`: the data that runs stage."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, runs, typer_options
from paceline.cli.parser import GroupedCommand, make_group
from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.launch_spec import staging_request
from paceline.launch.run_folder import resolve_scratch
from paceline.spec.job import Program
from paceline.spec.load import load_job
from paceline.spec.option import Flag
from paceline.spec.user_files import expand_home
from paceline.staging.copy import Transfer
from paceline.staging.packs import Packs
from paceline.staging.stager import ScannedItem, scan_items

if TYPE_CHECKING:
    from paceline.cli.forwarding import Forwarded

app = make_group(
    "Send data to a cluster, and prepare the data that runs stage to the nodes' disks."
)


@app.command(cls=GroupedCommand)
def stage(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...", help="Paths to stage [default: stage in [data] of paceline.toml]."
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


@app.command(cls=GroupedCommand)
def push(
    path: Annotated[str, typer.Argument(metavar="PATH", help="File or folder to send.")],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="Path there [default: its name, below <scratch>/<project>].",
        ),
    ] = None,
    yes: typer_options.Yes = False,
    serve: Annotated[str | None, typer.Option("--serve", hidden=True)] = None,
) -> int:
    """Send data to a cluster with rsync, over the connection of `paceline login`.

    Prints what goes where, and asks. If it is interrupted, the same command continues. It leaves out files that look
    like secrets, and links that lead out of the folder. Files that are newer on the cluster stay as they are there.

    \b
      paceline data push images --on alps                  to <scratch>/<project>/images, where `stage` finds it
      paceline data push images --on alps --to /data/me/images
    """
    if serve is not None:
        return _serve(path, serve)
    raise UsageError(
        "`paceline data push` needs a cluster.",
        hint=f"Add one, e.g. `paceline data push {path} --on alps`.",
    )


def _serve(name: str, to: str) -> int:
    """The side of the cluster: say where the data goes. The name of a folder ends with a slash."""
    is_folder, name = name.endswith("/"), name.rstrip("/")
    scratch, project = runs.project_here()
    target = scratch / project / expand_home(to or name)
    if to.endswith("/") or (to and target.is_dir() and not is_folder):
        target /= name
    target.parent.mkdir(parents=True, exist_ok=True)
    about = {"free": shutil.disk_usage(target.parent).free, "rsync": shutil.which("rsync") or ""}
    print(json.dumps({"target": str(target), "exists": target.exists(), **about}))
    return 0


# -- the side of the laptop ----------------------------------------------------------------------


def forwarded(asked: Forwarded) -> int:
    """Send data to the cluster that `--on` names."""
    from paceline.cli.on_cluster import ask, confirm
    from paceline.ssh.rsync import find_data

    data, to = find_data(expand_home(asked.values["path"])), str(asked.values.get("to") or "")
    name = data.name + "/" * data.is_folder
    connection, there = ask(asked, ["data", "push", "--serve", to, "--", name])
    target, rsync = there["target"], there["rsync"] if shutil.which("rsync") else ""
    place, files, size = f"{asked.names[0]}:{target}", len(data.names), data.size
    if not there["exists"] and size > there["free"]:
        raise EnvironmentProblem(
            f"{target} has only {show_size(there['free'])} free, but the data needs {show_size(size)}.",
            hint="Choose another place with --to.",
        )
    left_out = {
        "secrets, not sent": data.secrets,
        "links that point outside, not sent": data.outside,
        "not readable": data.unreadable,
    }
    console.say_note(f"{data.path}: {_count(files)}, {show_size(size)}, to {place}")
    if there["exists"] and rsync:
        found = data.send(connection, to=target, rsync=rsync, dry_run=True)
        files, size = found.files, found.size
        left_out[f"{len(found.newer)} newer on the cluster, not overwritten"] = found.newer
        console.say_note(f"new or changed: {_count(files)}, {show_size(size)}")
    for what, names in left_out.items():
        if names:
            console.say_note(f"{what}: {console.name_some(sorted(names))}")
    if files == 0:
        print(console.printable(f"nothing to send: {place} is up to date"))
        return 0
    if not asked.values.get("yes"):
        if not sys.stdin.isatty():
            raise UsageError(
                "Cannot ask for confirmation: standard input is not a terminal.",
                hint="Add --yes to send without asking.",
            )
        confirm()
    is_terminal = sys.stderr.isatty() and sys.stdout.isatty()
    data.send(connection, to=target, rsync=rsync, progress=is_terminal)
    print(console.printable(f"sent {_count(files)}, {show_size(size)}, to {place}"))
    return 0


def _count(files: int) -> str:
    return f"{files:,} file{'s' * (files != 1)}"
