"""`paceline data push`: send data to a cluster."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import console, typer_options
from paceline.cli.on_cluster.send_question import confirm
from paceline.contract.files.foreign_records import make, parse_object
from paceline.contract.files.size import show_size
from paceline.errors import ConnectionProblem, EnvironmentProblem, PacelineError, UsageError
from paceline.spec.home_path import expand_home

if TYPE_CHECKING:
    from paceline.cli.on_cluster.on_cluster import Forwarded
    from paceline.ssh.connection import Connection
    from paceline.ssh.data_push.sent_data import SentData
    from paceline.ssh.data_push.survey import Survey


@dataclass(frozen=True)
class _Place:
    """Where data goes on a cluster."""

    target: str
    exists: bool
    free: int  # bytes
    rsync: str | None


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
    """The side of the cluster: say where the data goes, and whether it can. The name of a folder ends with a slash."""
    from paceline.cli import runs

    is_folder, name = name.endswith("/"), name.rstrip("/")
    try:
        scratch, project = runs.project_here()
        target = scratch / project / expand_home(to or name)
        if to.endswith("/") or (to and target.is_dir() and not is_folder):
            target /= name
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        answer: dict[str, object] = asdict(
            _Place(str(target), target.exists(), free, shutil.which("rsync"))
        )
    except PacelineError as problem:
        answer = {
            "error": problem.message,
            "hint": problem.hint,
            "usage": isinstance(problem, UsageError),
        }
    except OSError as problem:
        answer = {
            "error": f"{problem.filename}: {problem.strerror}.",
            "hint": "Choose another place with --to.",
        }
    print(json.dumps(answer), flush=True)
    return 0


# -- the side of the laptop --------------------------------------------------------------------------------------


def forwarded(asked: Forwarded) -> int:
    """Send data to the cluster that `--on` names."""
    from paceline.ssh.data_push.rsync import push, require_rsync
    from paceline.ssh.data_push.sent_data import find_data
    from paceline.ssh.data_push.survey import survey

    require_rsync()
    data = find_data(expand_home(asked.values["path"]))
    connection, there = _ask(asked, data)
    name, target = connection.cluster.name, there.target
    if not there.rsync:
        raise EnvironmentProblem(
            f"There is no rsync on {name}.",
            hint=f"Set `setup` in [profiles.{name}] to load it, e.g. a module.",
        )
    if not there.exists and data.size > there.free:
        free = show_size(there.free)
        raise EnvironmentProblem(
            f"{target} has only {free} free, but the data needs {show_size(data.size)}.",
            hint="Choose another place with --to.",
        )
    rsync, place = there.rsync, f"{name}:{target}"
    found = survey(connection, data, to=target, rsync=rsync) if there.exists else None
    _state(data, place, found)
    is_current = found is not None and found.is_whole and found.files == 0
    if not asked.values.get("yes") and not is_current:
        _confirm()
    progress = sys.stderr.isatty() and sys.stdout.isatty() and not is_current
    parts = found.parts if found is not None else [(data, target)]
    done = [push(connection, each, to=to, rsync=rsync, progress=progress) for each, to in parts]
    print(
        console.printable(
            _describe_end(sum(each.files for each in done), sum(each.sent for each in done), place)
        )
    )
    return 0


def _describe_end(files: int, sent: int, place: str) -> str:
    if files == 0:
        return f"nothing to send: {place} is up to date"
    return f"sent {_count(files)}, {show_size(sent)}, to {place}"


def _ask(asked: Forwarded, data: SentData) -> tuple[Connection, _Place]:
    from paceline.cli.on_cluster.on_cluster import Forwarded, converse

    to = asked.values.get("to")
    name = data.name + "/" * data.is_folder
    line = ["data", "push", "--serve", to if isinstance(to, str) else "", "--", name]
    with converse(Forwarded(asked.names, asked.key, line, asked.values)) as talk:
        try:
            answer = parse_object(talk.read_line())
            place = make(_Place, answer) if "error" not in answer else None
        except ValueError:
            talk.close()
            if said := talk.errors.strip():
                raise ConnectionProblem(f"No usable answer from {asked.names[0]}: {said}") from None
            raise talk.connection.unclear() from None
    if place is None:
        kind = UsageError if answer.get("usage") else EnvironmentProblem
        raise kind(str(answer["error"]), hint=str(answer.get("hint", "")))
    return talk.connection, place


def _state(data: SentData, place: str, found: Survey | None) -> None:
    from paceline.ssh.data_push.rsync import describe_left

    for names, what in (
        (data.secrets, "secrets, not sent"),
        (
            found.outside if found is not None else data.outside,
            "links that point outside, not sent",
        ),
        (data.unreadable, "not readable"),
    ):
        if names:
            console.say_note(f"{what}: {describe_left(names)}")
    if found is not None and found.newer:
        newer = _count(len(found.newer)).replace(" ", " newer ")
        console.say_note(f"{newer} on the cluster, not overwritten: {describe_left(found.newer)}")
    if found is not None and found.through_links:
        console.say_note(
            f"links to folders on the cluster, which are followed: {describe_left(found.through_links)}"
        )
    console.say_note(f"{data.path}: {_count(data.files)}, {show_size(data.size)}, to {place}")
    if found is not None and found.files > 0:
        console.say_note(f"new or changed: {_count(found.files)}, {show_size(found.size)}")


def _count(files: int) -> str:
    return f"{files:,} file{'s' * (files != 1)}"


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            "Cannot ask for confirmation: standard input is not a terminal.",
            hint="Add --yes to send without asking.",
        )
    confirm()
