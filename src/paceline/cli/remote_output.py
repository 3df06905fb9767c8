"""Commands with `--on` that write files: they run on the cluster, and what they have written comes here."""

from __future__ import annotations

import secrets
from pathlib import Path

from paceline.cli import cluster_views, console, on_cluster, runs, typer_options
from paceline.cli.forwarding import Forwarded, find_project
from paceline.contract.files import open_output
from paceline.errors import UsageError
from paceline.spec.clusters import find_cluster
from paceline.ssh.connection import Connection, word
from paceline.ssh.installation import CACHE
from paceline.ssh.remote_command import copy_output

# The options that name a file, by command and parameter, and the file that is written without one.
OPTIONS = {"export": {"output": "model.safetensors"}, "sweep_show": {"csv": "", "report": ""}}


def forwarded(asked: Forwarded) -> int:
    """Carry out a command on the cluster that `--on` names, and bring its files here."""
    values, defaults = asked.values, OPTIONS.get(asked.key, {})
    files = {
        key: Path(path) for key, other in defaults.items() if (path := values.get(key) or other)
    }
    if not files or asked.has_several:
        return on_cluster.forward(asked)
    if len(files) > 1:
        raise UsageError(
            "With --on, --csv and --report cannot be combined.", hint="Write one, then the other."
        )
    [(key, path)] = files.items()
    typer_options.require_folder(path)
    if key != "report":
        return _bring(asked, key, path)
    # the packages that it needs are here, and may not be on the login node
    name = str(values.get("name") or runs.LAST)
    return cluster_views.show_once(
        asked, [cluster_views.SWEEP, name], ["report", name, "-o", str(path)]
    )


def _bring(asked: Forwarded, key: str, path: Path) -> int:
    """Let the command write into a folder there; copy the file from it."""
    cluster = find_cluster(asked.names[0], find_project(asked))
    connection = Connection(cluster)
    connection.require()
    made = connection.call(
        f'{CACHE}umask 077; folder="$cache/{console.FOLDER}{secrets.token_hex(8)}"; mkdir -p "$folder" && echo "$folder"\n'
    )
    folder = made.output.decode(errors="surrogateescape").rstrip("\n")
    if not folder:
        raise UsageError(f"Cannot write on {cluster.name}: {made.errors.strip()}")
    file = f"{folder}/{path.name}"
    # of an option that is there twice, the last one counts
    line = [*asked.line, f"--{key}", file]
    try:
        code = on_cluster.forward(Forwarded(asked.names, asked.key, line, asked.values))
        if code == 0:
            with open_output(path) as sink:
                if copy_output(connection, f"exec cat {word(file)}\n", sink) != 0:
                    raise connection.broken()
    finally:
        if connection.is_open():
            connection.call(f"rm -rf {word(folder)}\n")
    return code
