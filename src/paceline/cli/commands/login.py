"""`paceline login`: open the connection to a cluster that all other commands use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.contract import env
from paceline.errors import UsageError
from paceline.spec.clusters import ProjectFile, explain_table, find_cluster
from paceline.ssh.connection import Connection, close_all


def command(
    cluster: Annotated[
        str | None,
        typer.Argument(metavar="CLUSTER", help="The cluster (default: the one in paceline.toml)."),
    ] = None,
    *,
    show: Annotated[
        bool, typer.Option("--show", help="List the clusters, and whether you are logged in.")
    ] = False,
    close: Annotated[
        bool, typer.Option("--close", help="Log out of the cluster, or of all.")
    ] = False,
) -> int:
    """Log in to a cluster over SSH, once for all commands with `--on CLUSTER`.

    It uses your `ssh` and its configuration: keys, agents, jump hosts. You answer its questions here; no other command
    asks. The connection stays open until you close it, or until it has been idle for 12 hours.

    \b
      paceline login alps          one password or code
      paceline ps --on alps        uses that connection
      paceline login --show        list your clusters
      paceline login --close       close all connections; your jobs keep running
    """
    project = ProjectFile.find(Path.cwd())
    if show:
        return _show(project)
    if close and cluster is None:
        count = close_all()
        console.say_note(f"closed {count} connection{'s' * (count != 1)}")
        return 0
    name = cluster or os.environ.get(env.ON) or project.default
    if name is None:
        listed = "List your clusters with `paceline login --show`."
        raise UsageError(
            "`paceline login` needs the name of a cluster.",
            hint=listed if project.clusters() else explain_table(project),
        )
    connection = Connection(find_cluster(name, project))
    if close:
        connection.close()
        console.say_note(f"logged out of {name}")
    elif connection.is_open():
        console.say_note(f"you are already logged in to {name}")
    else:
        connection.open()
        host, leave = connection.cluster.host, f"paceline login --close {name}"
        console.say_note(f"logged in to {name} ({host}); to log out: {leave}")
    return 0


def _show(project: ProjectFile) -> int:
    clusters = project.clusters()
    if not clusters:
        console.say_note(f"no cluster is configured. {explain_table(project)}")
    for name, cluster in sorted(clusters.items()):
        state = "logged in" if Connection(cluster).is_open() else "not logged in"
        print(f"{console.printable(name):<16}  {cluster.host:<32}  {state}", flush=True)
    return 0
