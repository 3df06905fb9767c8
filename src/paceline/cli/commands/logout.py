"""`paceline logout`: close connections to clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.spec.clusters import Cluster, ProjectFile, find_cluster
from paceline.ssh.connection import Connection
from paceline.ssh.control_socket import read_logins


def command(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="The cluster [default: all].")
    ] = None,
) -> int:
    """Close the connection to a cluster, or all of them. Only your jobs keep running there.

    A connection that you opened yourself with ssh, and that your ssh configuration shares, stays open.

    \b
      paceline logout alps
      paceline logout            all clusters
    """
    logins = {login.host: login for login in read_logins()}
    if cluster is None:
        targets = [Cluster(login.cluster, login.host) for login in logins.values()]
    else:
        targets = [find_cluster(cluster, ProjectFile.find(Path.cwd()))]
    for target in targets:
        connection = Connection(target)
        if target.host not in logins and connection.socket.is_users and connection.is_open():
            console.say_note(
                f"ssh itself shares the connection to {target.name}; to close it: ssh -O exit {target.host}"
            )
            continue
        was_open = connection.is_open()
        connection.close()
        console.say_note(
            f"logged out of {target.name}"
            if was_open
            else f"you were not logged in to {target.name}"
        )
    if not targets:
        console.say_note("you are not logged in to any cluster")
    return 0
