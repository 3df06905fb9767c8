"""Commands with `--on` that write files: they run on the cluster, and what they have written comes here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.cli import on_cluster, typer_options
from paceline.cli.on_cluster import Forwarded
from paceline.contract.files import open_output
from paceline.errors import UsageError

# The options that name a file, by command and parameter, and the file that is written without one.
OPTIONS: dict[str, dict[str, str]] = {
    "export": {"output": "--output"},
    "sweep_show": {"csv": "--csv", "report": "--report"},
}
WRITTEN_HERE = "report"  # its packages are on the laptop, and need not be on the login node
DEFAULTS = {"output": "model.safetensors"}


def forwarded(asked: Forwarded) -> int:
    """Carry out a command on the cluster that `--on` names, and bring its files here."""
    options = OPTIONS.get(asked.key, {})
    wanted = {key: str(asked.values.get(key) or DEFAULTS.get(key, "")) for key in options}
    files = {key: Path(path) for key, path in wanted.items() if path}
    if not files or len(asked.names) > 1 or asked.names[0] == on_cluster.ALL:
        return on_cluster.forward(asked)
    for path in files.values():
        typer_options.require_folder(path)
    report = files.pop(WRITTEN_HERE, None)
    if report is None:
        return _carry_out(asked, files)
    if files:
        raise UsageError(
            "With --on, --csv and --report cannot be combined.", hint="Write one, then the other."
        )
    from paceline.cli.cluster_views import report_sweep

    return report_sweep(asked, report)


def describe(path: Path, text: str, say: Callable[[str], object]) -> None:
    """Say what a command has written; `{path}` in the text is the file."""
    say(text.replace("{path}", path.name if path.parent.name.startswith(OUTPUT) else str(path)))


OUTPUT = "output-"  # folders of files that a command writes for the laptop


def _carry_out(asked: Forwarded, files: Mapping[str, Path]) -> int:
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection, word
    from paceline.ssh.installation import CACHE
    from paceline.ssh.remote_command import copy_output

    connection = Connection(find_cluster(asked.names[0], on_cluster.find_project(asked)))
    connection.require()
    made = connection.call(
        f'{CACHE}umask 077; folder="$cache/{OUTPUT}{secrets.token_hex(8)}"; mkdir -p "$folder" && echo "$folder"\n'
    )
    folder = made.output.decode(errors="surrogateescape").rstrip("\n")
    if made.code != 0 or not folder:
        raise UsageError(f"Cannot write on {connection.cluster.name}: {made.errors.strip()}")
    line = list(asked.line)  # of an option that is there twice, the last one counts
    for key, path in files.items():
        line += [OPTIONS[asked.key][key], f"{folder}/{path.name}"]
    try:
        code = on_cluster.forward(Forwarded(asked.names, asked.key, line, asked.values))
        if code == 0:
            for path in files.values():
                with open_output(path) as sink:
                    script = f"exec cat {word(f'{folder}/{path.name}')}\n"
                    if copy_output(connection, script, sink) != 0:
                        raise connection.broken()
    finally:
        if connection.is_open():
            connection.call(f"rm -rf {word(folder)}\n")
    return code
