"""Commands with `--on` that write files: they run on the cluster, and what they have written comes here."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import console
from paceline.cli.on_cluster import on_cluster
from paceline.cli.on_cluster.on_cluster import Forwarded
from paceline.cli.transfer_progress import TransferProgress
from paceline.contract.env import ON_CLUSTER
from paceline.contract.output_file import open_output
from paceline.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from paceline.ssh.connection import Connection

CHUNK = 1 << 20
MAX_DIGITS = 18  # of the size of a file
# The options that name a file, by command and parameter, and the file that is written without one.
OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "export": {"output": ("--output", "-o")},
    "sweep_show": {"csv": ("--csv",), "report": ("--report",)},
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
        if not path.absolute().parent.is_dir():
            raise UsageError(
                f"The folder {path.parent} doesn't exist.",
                hint="Create it, or choose another file.",
            )
    report = files.pop(WRITTEN_HERE, None)
    if report is None:
        return _carry_out(asked, files)
    if files:
        line = _without(asked.line, OPTIONS[asked.key][WRITTEN_HERE])
        code = _carry_out(Forwarded(asked.names, asked.key, line, asked.values), files)
        if code != 0:
            return code
    from paceline.cli.cluster_views import report_sweep

    return report_sweep(asked, report)


def about_file(path: Path) -> Path | None:
    """Return the file that describes what a command writes for the laptop; None if it writes for this machine."""
    from paceline.ssh.remote.entry import OUTPUT

    is_for_laptop = os.environ.get(ON_CLUSTER) and path.parent.name.startswith(OUTPUT)
    return path.with_name(f"{path.name}.about") if is_for_laptop else None


def describe(path: Path, text: str, say: Callable[[str], object]) -> None:
    """Say what a command has written; `{path}` in the text is the file. The laptop says it once the file is there."""
    if (about := about_file(path)) is not None:
        about.write_text(text, encoding="utf-8")
    else:
        say(text.replace("{path}", str(path)))


def _carry_out(asked: Forwarded, files: Mapping[str, Path]) -> int:
    from paceline.spec.clusters import find_cluster
    from paceline.ssh.connection import Connection
    from paceline.ssh.installation import install, recorded_installation
    from paceline.ssh.remote.entry import OUTPUT
    from paceline.ssh.shell_text import word

    connection = Connection(find_cluster(asked.names[0], on_cluster.find_project(asked)))
    connection.require()
    installation = recorded_installation(connection) or install(connection, console.say_note)
    folder = f"{installation.cache}/{OUTPUT}{secrets.token_hex(12)}"
    line = list(asked.line)
    for key, path in files.items():
        flags = OPTIONS[asked.key][key]
        line = [*_without(line, flags), flags[0], f"{folder}/{path.name}"]
    made = connection.call(f"umask 077; mkdir -p {word(folder)}\n")
    if made.code != 0:
        raise EnvironmentProblem(
            f"Cannot write on {connection.cluster.name}: {made.errors.strip()}"
        )
    try:
        code = on_cluster.forward(Forwarded(asked.names, asked.key, line, asked.values))
        if code == 0:
            say = console.say_note if asked.key == "export" else print
            for path in files.values():
                replaced = ", replaced" if asked.key == "export" and path.exists() else ""
                about = _bring(connection, f"{folder}/{path.name}", path) or "copied to {path}"
                say(console.printable(f"{about.replace('{path}', str(path))}{replaced}"))
    finally:
        if connection.is_open():
            connection.call(f"rm -rf {word(folder)}\n")
    return code


def _without(line: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a command line without an option that takes a value."""
    kept: list[str] = []
    words = iter(line)
    for each in words:
        if each in flags:
            next(words, None)
        elif not any(
            each.startswith(f"{flag}=") or (not flag.startswith("--") and each.startswith(flag))
            for flag in flags
        ):
            kept.append(each)
    return kept


def _bring(connection: Connection, remote: str, path: Path) -> str:
    """Copy a file from the cluster, and put it in place once it is complete; return what describes it."""
    from paceline.ssh.conversation import Conversation
    from paceline.ssh.shell_text import word

    file = word(remote)
    script = f"cat {word(f'{remote}.about')}; echo; wc -c <{file} && sha256sum <{file} && exec cat {file}\n"
    with (
        Conversation(connection, script) as talk,
        open_output(path) as sink,
        TransferProgress() as progress,
    ):
        about = talk.read_line().decode(errors="replace").strip()
        size, digest = talk.read_line().strip(), talk.read_line()[:64].decode(errors="replace")
        if not size.isdigit() or len(size) > MAX_DIGITS:
            raise EnvironmentProblem(
                f"{remote} cannot be read: {talk.errors.strip() or 'no answer'}."
            )
        progress.begin(int(size))
        found, arrived = hashlib.sha256(), 0
        with suppress(ConnectionError):
            while part := talk.output.read(CHUNK):
                sink.write(part)
                found.update(part)
                arrived += len(part)
                progress.advance(len(part), path.name)
        if found.hexdigest() != digest:
            raise connection.lost(f"{arrived:,} of {int(size):,} bytes of {path.name} have arrived")
    return about
