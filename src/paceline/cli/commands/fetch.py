"""`paceline fetch`: copy a run from a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import console, runs
from paceline.cli.transfer_progress import TransferProgress
from paceline.contract.checkpoint.names import is_weights_file
from paceline.contract.files.size import show_size
from paceline.errors import PacelineError, UsageError
from paceline.spec.home_path import expand_home

if TYPE_CHECKING:
    from paceline.cli.on_cluster.on_cluster import Forwarded
    from paceline.ssh.fetch.download import Fetched
    from paceline.ssh.fetch.remote_files import Listing

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
    serve: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
) -> int:
    """Copy a run from a cluster, to look at it here with `show`, `report`, `logs` and `ui`.

    Fetches records, metrics, logs and results of up to 10 MB each. If it is interrupted, the same command continues.
    Run it again to get what is new. Each file is checked, and appears only when it is complete.

    \b
      paceline fetch last --on alps              the newest run: records, metrics, logs
      paceline fetch 1a2b --on alps --weights    also its newest checkpoint
      paceline fetch 1a2b --on alps --all        the whole run folder
      paceline fetch 1a2b --on alps --to results into results/RUN-ID
    """
    if serve:
        return _serve(run)
    raise UsageError(
        "`paceline fetch` needs a cluster.",
        hint="Add one, e.g. `paceline fetch last --on alps`. On the cluster itself, the run folder is already there.",
    )


def _serve(run: str) -> int:
    """The side of the cluster: answer what the laptop asks."""
    from paceline.ssh.fetch.frames import write_line
    from paceline.ssh.fetch.server import FileServer
    from paceline.watch.records import read_record

    sink = sys.stdout.buffer
    try:
        folder = runs.named(run, verb="fetch")
        FileServer(folder, status=lambda: read_record(folder).status).serve(sys.stdin.buffer, sink)
    except PacelineError as problem:
        about = {
            "error": problem.message,
            "hint": problem.hint,
            "usage": isinstance(problem, UsageError),
        }
        write_line(sink, about)
    return 0


# -- the side of the laptop --------------------------------------------------------------------------------------


def forwarded(asked: Forwarded) -> int:
    """Fetch a run from the cluster that `--on` names."""
    from paceline.cli.on_cluster.on_cluster import Forwarded, converse
    from paceline.ssh.fetch.download import Download
    from paceline.ssh.fetch.remote_files import RemoteFiles

    values, what = asked.values, _what(asked.values)
    run, to = values.get("run"), values.get("to")
    place = None if to is None else expand_home(to)
    line = ["fetch", "--serve", "--", run if isinstance(run, str) else "last"]
    with (
        converse(Forwarded(asked.names, asked.key, line, values)) as talk,
        TransferProgress() as progress,
    ):
        cluster = talk.connection.cluster.name
        download = Download(
            RemoteFiles(talk),
            what=what,
            overwrite=bool(values.get("overwrite")),
            cluster=cluster,
            progress=progress,
        )
        fetched = download.run(lambda listing: _target(listing, place))
    return _describe(fetched, what, cluster)


def _what(values: Any) -> str:
    from paceline.ssh.fetch.contents import ALL, LOGS, RECORDS, WEIGHTS

    flags = {"weights": WEIGHTS, "logs": LOGS, "everything": ALL}
    chosen = [what for name, what in flags.items() if values.get(name)]
    if len(chosen) > 1:
        raise UsageError(
            "Use only one of --weights, --logs and --all.", hint="--all includes the others."
        )
    return chosen[0] if chosen else RECORDS


def _target(listing: Listing, to: Path | None) -> Path:
    from paceline.contract.sweep.folder import SweepFolder
    from paceline.launch.run_folder import create_scratch

    if to is not None:
        return to.absolute() / listing.key
    scratch = runs.scratch_here()
    folder = scratch.joinpath(*listing.run_path)
    if len(listing.run_path) == 5 and SweepFolder(folder.parent.parent).spec.exists():
        raise UsageError(
            f"{folder.parent.parent} is a sweep on this machine.",
            hint="Choose another folder with --to FOLDER.",
        )
    create_scratch(scratch)
    return folder


def _describe(fetched: Fetched, what: str, cluster: str) -> int:
    from paceline.ssh.fetch.contents import ALL, WEIGHTS

    listing, contents = fetched.listing, fetched.listing.contents
    for note in fetched.notes[:SHOWN_NOTES]:
        console.say_note(note)
    if len(fetched.notes) > SHOWN_NOTES:
        console.say_note(f"and {len(fetched.notes) - SHOWN_NOTES} more")
    files = f"{fetched.files} new or changed file{'s' * (fetched.files != 1)}"
    news = f"{files}, {show_size(fetched.size)}" if fetched.files else "nothing new"
    print(console.printable(f"fetched {listing.key} ({listing.status}) from {cluster}: {news}"))
    print(f"  folder  {console.printable(str(fetched.folder))}")
    if fetched.checkpoints:
        count = len(fetched.checkpoints)
        shown = fetched.checkpoints[0] if count == 1 else f"{count} checkpoints"
        print(f"  weights {console.printable(shown)}")
    if what != ALL and (left_there := _left_there(fetched)):
        left = ", ".join(f"{name} ({show_size(size)})" for name, size in sorted(left_there.items()))
        print(f"  left    {console.printable(left)}; --all fetches everything")
    if contents.skipped:
        print(
            f"  links   {console.printable(_first(contents.skipped))}: not fetched, because they point outside the run"
            " folder"
        )
    if (
        what == WEIGHTS
        and not fetched.checkpoints
        and not any(is_weights_file(each.name) for each in contents.files)
    ):
        console.say_problem(
            "The run has no complete checkpoint.",
            "It may be too early: check with `paceline show` there.",
        )
        return 1
    return _name_missing(fetched, cluster)


def _left_there(fetched: Fetched) -> dict[str, int]:
    """Return what is on the cluster alone, with its bytes. An earlier command may have fetched more than this one."""
    found: dict[str, int] = {}
    contents = fetched.listing.contents
    coming = [(file.name.split("/")[0], file.size) for file in contents.files]
    for name, size in contents.left.items():
        top, _, checkpoint = name.partition("/")
        here = fetched.folder / name
        if checkpoint and here.is_dir():
            continue
        if not checkpoint and _bytes(here) >= size + sum(
            each for other, each in coming if other == top
        ):
            continue
        shown = "older checkpoints" if checkpoint and fetched.checkpoints else top
        found[shown] = found.get(shown, 0) + size
    return found


def _bytes(path: Path) -> int:
    """Return what a file or a folder holds; -1 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    sizes = [each.lstat().st_size for each in files if each.is_file() and not each.is_symlink()]
    return sum(sizes) if sizes else -1


def _name_missing(fetched: Fetched, cluster: str) -> int:
    """Say what did not come, and return the exit code."""
    if not fetched.missing:
        return 0
    shown = _first([f"{name} ({reason})" for name, reason in fetched.missing.items()])
    is_all = not fetched.notes and not fetched.listing.contents.skipped
    rest = (
        "Everything else that you asked for is here."
        if is_all
        else "See above for what else was not fetched."
    )
    hint = f"{rest} Repeat the command when they can be read on {cluster} and the run is over."
    console.say_problem(f"Not fetched: {shown}.", hint)
    return 1


def _first(texts: list[str]) -> str:
    """Return a few texts, and how many more there are."""
    more = f" and {len(texts) - SHOWN_NOTES} more" if len(texts) > SHOWN_NOTES else ""
    return ", ".join(texts[:SHOWN_NOTES]) + more
