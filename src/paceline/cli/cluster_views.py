"""Commands with `--on` that show runs.

`top`, `ui` and `report` show a copy of the runs here. The others run on the login node; without a
connection, they show the copy too, with its age.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.cli import console, on_cluster, run_command, runs
from paceline.cli.forwarding import Forwarded, find_project
from paceline.errors import UsageError
from paceline.spec.clusters import Cluster, ProjectFile, find_cluster
from paceline.ssh.connection import Connection
from paceline.ssh.remote_command import prepare, read_error
from paceline.ssh.run_copy import SOME, Follower, News, RunCopy, Stream, print_news
from paceline.ui.actions import act
from paceline.watch.origin import ClusterCopy, show, status

SERVER = "view-server"  # the command on the login node that all this asks
FOLLOW, ONCE, ACT = "follow", "once", "act"


def forwarded(asked: Forwarded) -> int:
    """Show runs of the cluster that `--on` names."""
    on_cluster.require_one(asked)
    project = find_project(asked)
    cluster = find_cluster(asked.names[0], project)
    copy = ClusterCopy(cluster.name, copy_folder(cluster, project), _actor(asked))
    connection = Connection(cluster)
    if not connection.is_open():
        return _show_old(asked, copy, connection)
    if asked.key in ("top", "ui"):
        return _follow(asked, copy)
    if asked.key == "report":
        name = str(asked.values.get("name") or runs.LAST)
        return _show_once(asked, name)
    return on_cluster.forward(asked)


def copy_folder(cluster: Cluster, project: ProjectFile) -> Path:
    """Return where the copy of a cluster's runs is. Each scratch folder there has its own."""
    tables = [project.values.get("profiles", {}).get(cluster.name, {}), project.values]
    settings = [table.get("project") for table in tables]
    found = (each.get("scratch") for each in settings if isinstance(each, dict))
    about = json.dumps([cluster.name, cluster.host, str(next(filter(None, found), ""))])
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "paceline", "views", hashlib.sha256(about.encode()).hexdigest()[:16])


def _follow(asked: Forwarded, copy: ClusterCopy) -> int:
    say = (lambda text: None) if asked.key == "top" else console.say_note
    Follower(copy.base, lambda: _stream(asked, [FOLLOW]), cluster=copy.cluster, say=say).begin()
    with show(copy):
        return run_command(asked.line)


def _show_once(asked: Forwarded, name: str) -> int:
    """Copy one run or sweep into a folder of its own, and show that."""
    with tempfile.TemporaryDirectory(prefix="paceline-view-") as folder:
        copy = RunCopy(Path(folder), log_bytes=SOME)
        with _stream(asked, [ONCE, name]) as (connection, lines):
            for news in lines:
                copy.apply(connection, news)
        with show(ClusterCopy(asked.names[0], Path(folder), _actor(asked))):
            return run_command(asked.line)


def _show_old(asked: Forwarded, copy: ClusterCopy, connection: Connection) -> int:
    """Show what the copy has. Raises the problem if it has nothing, or waits for something."""
    news = copy.news()
    if not news["here"] or asked.values.get("follow") or asked.key == "top":
        raise connection.broken()
    if not news["problem"]:
        RunCopy(copy.base).note(f"no connection to {copy.cluster}")
    with show(copy):
        console.say_note(f"{status()}. To connect: paceline login {copy.cluster}")
        return run_command(asked.line)


@contextmanager
def _stream(asked: Forwarded, question: list[str]) -> Iterator[tuple[Connection, Iterator[News]]]:
    """Ask the cluster for news of runs, and read them as they come."""
    server = _server(asked, question)
    connection, command = on_cluster.make_request(server, find_project(asked))
    with Stream(connection, prepare(connection, command)) as stream:
        yield connection, stream.news()
        if (code := stream.wait()) and connection.is_open():
            raise read_error(stream.errors(), code, asked.names[0])


def _actor(asked: Forwarded) -> Any:
    def act_there(verb: str, run: str) -> str:
        """Do something to a run on the cluster; return what was done there."""
        server = _server(asked, [ACT, verb, run])
        return str(on_cluster.ask(server, server.line)[1]["done"])

    return act_there


def _server(asked: Forwarded, question: list[str]) -> Forwarded:
    config = {"config": asked.values.get("config")}
    return Forwarded(asked.names, "view_server", [SERVER, *question], config)


# -- the side of the cluster ---------------------------------------------------------------------


def serve(args: Sequence[str]) -> int:
    """Print news of runs, or do something to one: `follow`, `once RUN`, `act VERB RUN`."""
    kind, *rest = args or [""]
    if kind == ACT:
        print(json.dumps({"done": act(runs.own(rest[1]), rest[0])}))
        return 0
    if kind not in (FOLLOW, ONCE):
        raise UsageError("This is started by commands with --on.")
    named = runs.run_or_sweep(rest[0]).path if kind == ONCE else None
    with suppress(BrokenPipeError):
        print_news(runs.scratch_here(), named, follow=kind == FOLLOW)
    return 0
