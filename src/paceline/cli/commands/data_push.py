"""`paceline data push`: send data to a cluster."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, typer_options
from paceline.cli.cluster_request import confirm
from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem, UsageError
from paceline.spec.home_path import expand_home

if TYPE_CHECKING:
    from paceline.cli.on_cluster import Forwarded
    from paceline.ssh.data_push import SentData
    from paceline.ssh.rsync import Copied


SHOWN = 5


def command(
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
    from paceline.cli import runs

    is_folder, name = name.endswith("/"), name.rstrip("/")
    scratch, project = runs.project_here()
    target = scratch / project / expand_home(to or name)
    if to.endswith("/") or (to and target.is_dir() and not is_folder):
        target /= name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        exists = target.exists()
    except OSError as problem:
        raise EnvironmentProblem(
            f"{problem.filename}: {problem.strerror}.", hint="Choose another place with --to."
        ) from None
    rsync = shutil.which("rsync") or ""
    print(json.dumps({"target": str(target), "exists": exists, "free": free, "rsync": rsync}))
    return 0


# -- the side of the laptop ----------------------------------------------------------------------


def forwarded(asked: Forwarded) -> int:
    """Send data to the cluster that `--on` names."""
    from paceline.cli.on_cluster import ask
    from paceline.ssh.data_push import find_data

    data, to = find_data(expand_home(asked.values["path"])), asked.values.get("to")
    name = data.name + "/" * data.is_folder
    connection, there = ask(asked, ["data", "push", "--serve", str(to or ""), "--", name])
    target, place = there["target"], f"{asked.names[0]}:{there['target']}"
    rsync = there["rsync"] if shutil.which("rsync") else ""
    if not there["exists"] and data.size > there["free"]:
        raise EnvironmentProblem(
            f"{target} has only {show_size(there['free'])} free, but the data needs"
            f" {show_size(data.size)}.",
            hint="Choose another place with --to.",
        )
    is_known = there["exists"] and rsync
    found = data.send(connection, to=target, rsync=rsync, dry_run=True) if is_known else None
    _state(data, place, found)
    if found is not None and found.code == 0 and found.files == 0:
        print(console.printable(f"nothing to send: {place} is up to date"))
        return 0
    if not asked.values.get("yes"):
        _confirm()
    is_terminal = sys.stderr.isatty() and sys.stdout.isatty()
    data.send(connection, to=target, rsync=rsync, progress=is_terminal)
    files, size = (found.files, found.size) if found else (len(data.names), data.size)
    print(console.printable(f"sent {_count(files)}, {show_size(size)}, to {place}"))
    return 0


def _state(data: SentData, place: str, found: Copied | None) -> None:
    for names, what in (
        (data.secrets, "secrets, not sent"),
        (data.outside, "links that point outside, not sent"),
        (data.unreadable, "not readable"),
    ):
        if names:
            console.say_note(f"{what}: {_first(names)}")
    if found is not None and found.newer:
        newer = _count(len(found.newer)).replace(" ", " newer ")
        console.say_note(f"{newer} on the cluster, not overwritten: {_first(found.newer)}")
    console.say_note(f"{data.path}: {_count(len(data.names))}, {show_size(data.size)}, to {place}")
    if found is not None and found.files > 0:
        console.say_note(f"new or changed: {_count(found.files)}, {show_size(found.size)}")


def _first(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more


def _count(files: int) -> str:
    return f"{files:,} file{'s' * (files != 1)}"


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            "Cannot ask for confirmation: standard input is not a terminal.",
            hint="Add --yes to send without asking.",
        )
    confirm()
