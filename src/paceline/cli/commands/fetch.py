"""`paceline fetch`: copy a run from a cluster."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, runs
from paceline.contract.checkpoint import is_weights_file
from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem, UsageError
from paceline.spec.run_path import is_run_path
from paceline.spec.user_files import expand_home

if TYPE_CHECKING:
    from paceline.cli.forwarding import Forwarded
    from paceline.ssh.connection import Connection
    from paceline.ssh.fetch import Fetched


def command(
    run: runs.Run = "last",
    *,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also fetch the newest intact checkpoint.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Fetch the whole run folder, with all checkpoints and the code."
        ),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Fetch into FOLDER/RUN-ID [default: among this project's runs].",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace files that were changed here since they were fetched."
        ),
    ] = False,
    serve: Annotated[str | None, typer.Option("--serve", hidden=True)] = None,
) -> int:
    """Copy a run from a cluster, to look at it here with `show`, `report`, `logs` and `ui`.

    Fetches records, metrics, logs and results of up to 10 MB each. If it is interrupted, the same command continues.
    Run it again to get what is new. Each file and checkpoint appears only when it is complete.

    \b
      paceline fetch last --on alps              the newest run: records, metrics, logs
      paceline fetch 1a2b --on alps --weights    also its newest checkpoint
      paceline fetch 1a2b --on alps --all        the whole run folder
      paceline fetch 1a2b --on alps --to results into results/RUN-ID
    """
    if serve is not None:
        return _serve(run, serve.split(","))
    raise UsageError(
        "`paceline fetch` needs a cluster.",
        hint="Add one, e.g. `paceline fetch last --on alps`. On the cluster itself, the run folder is already there.",
    )


def _serve(run: str, asked: list[str]) -> int:
    """The side of the cluster: list what there is to fetch, without some damaged checkpoints."""
    from paceline.spec.run_path import run_path_of
    from paceline.ssh.fetch import choose_contents
    from paceline.watch.records import read_record

    folder = runs.named(run)
    path = run_path_of(folder)
    about = {
        "folder": str(folder.path),
        "key": folder.key,
        "run_path": "/".join([path.project, path.experiment, path.run_id]),
        # before the files: a run that is over by then has written all of them
        "status": read_record(folder).status,
        "rsync": shutil.which("rsync") or "",
    }
    print(json.dumps({**about, **asdict(choose_contents(folder, asked[0], skip=asked[1:]))}))
    return 0


# -- the side of the laptop ----------------------------------------------------------------------


def forwarded(asked: Forwarded) -> int:
    """Fetch a run from the cluster that `--on` names."""
    from paceline.cli.on_cluster import ask
    from paceline.ssh.fetch import ALL, RECORDS, WEIGHTS, fetch

    values, to = asked.values, asked.values.get("to")
    place = None if to is None else expand_home(to)
    flags = {"weights": WEIGHTS, "everything": ALL}
    chosen = [what for name, what in flags.items() if values.get(name)] or [RECORDS]
    if len(chosen) > 1:
        raise UsageError("Use only one of --weights and --all.", hint="--all includes the weights.")

    def listing(skip: Sequence[str]) -> tuple[Connection, Mapping[str, Any]]:
        run = str(values.get("run") or "last")
        return ask(asked, ["fetch", "--serve", ",".join([*chosen, *skip]), "--", run])

    fetched = fetch(
        listing,
        lambda found: _target(found, place),
        overwrite=bool(values.get("overwrite")),
        progress=sys.stderr.isatty() and sys.stdout.isatty(),
    )
    return _describe(fetched, chosen[0], asked.names[0])


def _target(listing: Mapping[str, Any], to: Path | None) -> Path:
    """Return where the run goes: among the project's runs, unless another place was named."""
    from paceline.contract.sweep_folder import SweepFolder
    from paceline.launch.run_folder import create_scratch

    if to is not None:
        return to.absolute() / str(listing["key"])
    scratch, run_path = runs.scratch_here(), str(listing["run_path"])
    if not is_run_path(run_path):
        raise EnvironmentProblem(
            f"The run lies in a folder whose name is not that of a run: {listing['folder']}.",
            hint="If you renamed or moved it, restore its path: PROJECT/EXPERIMENT/RUN-ID.",
        )
    folder = scratch / run_path
    if run_path.count("/") == 4 and SweepFolder(folder.parent.parent).spec.exists():
        raise UsageError(
            f"{folder.parent.parent} is a sweep on this machine.",
            hint="Choose another folder with --to FOLDER.",
        )
    create_scratch(scratch)
    return folder


def _describe(fetched: Fetched, what: str, cluster: str) -> int:
    from paceline.ssh.fetch import ALL, WEIGHTS

    listing, count = fetched.listing, len(fetched.checkpoints)
    for note in fetched.notes:
        console.say_note(note)
    files = f"{fetched.files} new or changed file{'s' * (fetched.files != 1)}"
    news = f"{files}, {show_size(fetched.size)}" if fetched.files else "nothing new"
    left = [row[1] for row in listing["left"] if not os.path.lexists(fetched.folder / row[0])]
    lines = [f"fetched {listing['key']} ({listing['status']}) from {cluster}: {news}"]
    lines.append(f"  folder  {fetched.folder}")
    if count:
        lines.append(
            f"  weights {fetched.checkpoints[0] if count == 1 else f'{count} checkpoints'}"
        )
    if what != ALL and left:
        lines.append(f"  left    {show_size(sum(left))} on {cluster}; --all fetches everything")
    if links := listing["skipped"]:
        lines.append(
            f"  links   {console.name_some(links)}: not fetched, because they point outside the run folder"
        )
    print(console.printable("\n".join(lines)))
    has_weights = count or any(is_weights_file(row[0]) for row in listing["files"])
    if what == WEIGHTS and not has_weights:
        raise EnvironmentProblem(
            "The run has no complete checkpoint.",
            hint="It may be too early: check with `paceline show` there.",
        )
    if fetched.missing:
        names = [f"{name} ({why})" for name, why in fetched.missing.items()]
        raise EnvironmentProblem(
            f"Not fetched: {console.name_some(names)}.",
            hint=f"Repeat the command when they can be read on {cluster} and the run is over.",
        )
    return 0
