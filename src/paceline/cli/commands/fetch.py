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
from paceline.spec.home_path import expand_home
from paceline.spec.run_path import is_run_path

if TYPE_CHECKING:
    from paceline.cli.on_cluster import Forwarded
    from paceline.ssh.connection import Connection
    from paceline.ssh.fetch import Fetched

SHOWN_NOTES = 8


def command(
    run: runs.Run = "last",
    *,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also fetch the newest intact checkpoint.")
    ] = False,
    logs: Annotated[
        bool, typer.Option("--logs", help="Fetch only the logs, and what `paceline logs` needs.")
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
    # before the files: a run that is over by then has written all of them
    status = read_record(folder).status
    path = run_path_of(folder)
    about = {
        "folder": str(folder.path),
        "key": folder.key,
        "run_path": "/".join([path.project, path.experiment, path.run_id]),
        "status": status,
        "rsync": shutil.which("rsync") or "",
    }
    print(json.dumps({**about, **asdict(choose_contents(folder, asked[0], skip=asked[1:]))}))
    return 0


# -- the side of the laptop ----------------------------------------------------------------------


def forwarded(asked: Forwarded) -> int:
    """Fetch a run from the cluster that `--on` names."""
    from paceline.cli.on_cluster import ask
    from paceline.ssh.fetch import fetch

    values, what = asked.values, _what(asked.values)
    run, to = str(values.get("run") or "last"), values.get("to")
    place = None if to is None else expand_home(to)

    def listing(skip: Sequence[str]) -> tuple[Connection, Mapping[str, Any]]:
        return ask(asked, ["fetch", "--serve", ",".join([what, *skip]), "--", run])

    fetched = fetch(
        listing,
        lambda found: _target(found, place),
        overwrite=bool(values.get("overwrite")),
        progress=sys.stderr.isatty() and sys.stdout.isatty(),
    )
    return _describe(fetched, what, asked.names[0])


def _what(values: Any) -> str:
    from paceline.ssh.fetch import ALL, LOGS, RECORDS, WEIGHTS

    flags = {"weights": WEIGHTS, "logs": LOGS, "everything": ALL}
    chosen = [what for name, what in flags.items() if values.get(name)]
    if len(chosen) > 1:
        raise UsageError(
            "Use only one of --weights, --logs and --all.", hint="--all includes the others."
        )
    return chosen[0] if chosen else RECORDS


def _target(listing: Mapping[str, Any], to: Path | None) -> Path:
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

    listing = fetched.listing
    for note in fetched.notes[:SHOWN_NOTES]:
        console.say_note(note)
    if len(fetched.notes) > SHOWN_NOTES:
        console.say_note(f"and {len(fetched.notes) - SHOWN_NOTES} more")
    files = f"{fetched.files} new or changed file{'s' * (fetched.files != 1)}"
    news = f"{files}, {show_size(fetched.size)}" if fetched.files else "nothing new"
    lines = [
        f"fetched {listing['key']} ({listing['status']}) from {cluster}: {news}",
        f"  folder  {fetched.folder}",
    ]
    if fetched.checkpoints:
        count = len(fetched.checkpoints)
        lines.append(
            f"  weights {fetched.checkpoints[0] if count == 1 else f'{count} checkpoints'}"
        )
    left = [row[1] for row in listing["left"] if not os.path.lexists(fetched.folder / row[0])]
    if what != ALL and left:
        lines.append(f"  left    {show_size(sum(left))} on {cluster}; --all fetches everything")
    if listing["skipped"]:
        links = _first(listing["skipped"])
        lines.append(f"  links   {links}: not fetched, because they point outside the run folder")
    print(console.printable("\n".join(lines)))
    if (
        what == WEIGHTS
        and not fetched.checkpoints
        and not any(is_weights_file(row[0]) for row in listing["files"])
    ):
        console.say_problem(
            "The run has no complete checkpoint.",
            "It may be too early: check with `paceline show` there.",
        )
        return 1
    if not fetched.missing:
        return 0
    console.say_problem(
        f"Not fetched: {_first([f'{name} ({why})' for name, why in fetched.missing.items()])}.",
        f"Repeat the command when they can be read on {cluster} and the run is over.",
    )
    return 1


def _first(texts: list[str]) -> str:
    """Return a few texts, and how many more there are."""
    more = f" and {len(texts) - SHOWN_NOTES} more" if len(texts) > SHOWN_NOTES else ""
    return ", ".join(texts[:SHOWN_NOTES]) + more
