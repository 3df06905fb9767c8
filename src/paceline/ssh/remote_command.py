"""Carry out a command of Paceline on a login node, as if it had been typed there.

First, one question: are Paceline and the project there? What is missing is sent. Then ssh runs the
command itself: its output, its exit code and Ctrl-C are those of the login node. Its arguments and
secrets go through the connection into a file that only the user can read; the command reads and
removes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from paceline.contract import env
from paceline.contract.run_folder import (
    INTERRUPTED_EXIT,
    UNSETTLED_EXIT,
    UNWATCHED_EXIT,
    USAGE_EXIT,
    write_atomically,
)
from paceline.errors import ConnectionProblem, EnvironmentProblem, PacelineError, UsageError
from paceline.spec.shell_text import quote
from paceline.spec.user_files import state_folder
from paceline.ssh import code, installation
from paceline.ssh.code import Parcel
from paceline.ssh.connection import (
    SETUP_FAILED,
    SSH_FAILED,
    Answer,
    Connection,
    new_mark,
    setup_text,
    word,
)

# the command that takes piped input; what a caller pipes into others, such as a loop, is its own
READS_INPUT = "shell"
_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class RemoteCommand:
    """A command line, the project that it needs, and the variables that it gets."""

    args: Sequence[str]  # of `paceline`
    folder: str  # the current folder, relative to the project
    parcel: Parcel
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_sources: Mapping[str, str] = field(default_factory=dict)


def carry_out(connection: Connection, command: RemoteCommand) -> int:
    """Carry a command out with this terminal, or these pipes; return its exit code."""
    script = prepare(connection, command)
    exit_code = _run(connection, script, reads_input=command.args[:1] == [READS_INPUT])
    if exit_code == SSH_FAILED:
        raise _cut_off(connection)
    return 1 if exit_code == SETUP_FAILED else exit_code


def capture(connection: Connection, command: RemoteCommand) -> Answer:
    """Carry a command out and return what it wrote, such as JSON. Raises what it complains of."""
    answer = connection.call(prepare(connection, command))
    if answer.code == SSH_FAILED:
        raise _cut_off(connection)
    if answer.code != 0:
        raise read_error(answer.errors, answer.code, connection.cluster.name)
    return answer


def read_error(errors: str, code: int, cluster: str) -> PacelineError:
    """Return the error that a command printed."""
    _, _, text = errors.rpartition("paceline: error: ")
    message, *hints = text.strip().splitlines() or [f"The command ended with exit code {code}."]
    kind = UsageError if code == USAGE_EXIT else EnvironmentProblem
    return kind(f"{cluster}: {message}", hint=" ".join(each.strip() for each in hints))


def _cut_off(connection: Connection) -> ConnectionProblem:
    """Return the error for a command that did not end by itself."""
    name = connection.cluster.name
    if not connection.is_open():
        return ConnectionProblem(
            f"The connection to {name} was lost, and the command there has ended with it.",
            hint=f"Jobs keep running. Type: paceline login {name}",
        )
    return ConnectionProblem(
        f"The command on {name} was cut off: something there killed it, such as a limit on memory.",
        hint=f"Try again. If it happens again, ask the administrators of {name}.",
    )


def submit(connection: Connection, command: RemoteCommand) -> int:
    """Carry out `submit`. If its answer is lost, the same command finds its job before it submits one.

    A file remembers the command until its answer is here; its id goes along, and the run has it.
    """
    name = connection.cluster.name
    folder, about = state_folder("submissions"), [name, connection.cluster.host, os.getcwd()]
    key = hashlib.sha256(json.dumps([*about, *command.args]).encode()).hexdigest()[:16]
    pending = folder / key
    is_repeat = pending.exists()
    if is_repeat:
        _log.info(f"the answer to this command was lost earlier: {name} looks for its job first")
    identity, digest = secrets.token_hex(12), command.parcel.code.digest
    if is_repeat:
        identity, _, earlier = pending.read_text(encoding="ascii").partition(" ")
        if earlier != digest:
            _log.info(
                "your code has changed since; if there is an earlier job, it has the old code"
            )
    more = {env.REQUEST: identity, **({env.REPEATED: "1"} if is_repeat else {})}
    command = replace(command, variables={**command.variables, **more})
    script = prepare(connection, command)  # until here, nothing is submitted
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(pending, f"{identity} {digest}")
    repeat = "repeat the command. It reports the job if there is one, and does not submit it twice"
    try:
        exit_code = _run(connection, script)
    except KeyboardInterrupt:
        _log.info(f"interrupted; the job may be in the queue of {name}. To find out, {repeat}")
        raise
    if exit_code == SSH_FAILED:
        login = "" if connection.is_open() else f"Type: paceline login {quote(name)}; then "
        raise ConnectionProblem(
            f"The connection to {name} was lost, or the command there was killed. The job may or may"
            " not be in the queue.",
            hint=f"{login}{repeat}.",
        )
    if exit_code not in (INTERRUPTED_EXIT, UNSETTLED_EXIT):
        pending.unlink(missing_ok=True)
    if exit_code == UNWATCHED_EXIT:
        return INTERRUPTED_EXIT
    return 1 if exit_code in (SETUP_FAILED, UNSETTLED_EXIT) else exit_code


def prepare(connection: Connection, command: RemoteCommand) -> str:
    """Bring Paceline, the project and the secrets to the login node.

    Return a script of `sh` that carries the command out.
    """
    cluster, parcel = connection.cluster, command.parcel
    there, place = installation.locate(cluster), code.locate(parcel)
    received = f"secrets-{secrets.token_hex(12)}"
    question = (
        f"umask 077\n{there}{place}"
        f"{installation.is_complete()} && echo installed\n{code.is_complete(parcel)} && echo code\n"
        f"command -v rsync >/dev/null && echo rsync\n{code.newest_like(parcel)}"
    )
    # What a command that never started has left is removed by a later one.
    question += (
        'find "$cache" -maxdepth 1 -name "secrets-*" -mmin +60 -exec rm -f {} + 2>/dev/null\n'
        f'mkdir -p "$cache" && cat >"$cache/{received}" || exit\n'
    )
    # A process's arguments are there for all to read, and `--env NAME=VALUE` is one.
    content = json.dumps([dict(command.secrets), dict(command.secret_sources), [*command.args]])
    answer = connection.call(f"{question}exit 0\n", content=content.encode())
    if answer.code != 0:
        raise EnvironmentProblem(f"Cannot write on {cluster.name}: {answer.errors.strip()}")
    lines = answer.output.decode(errors="surrogateescape").splitlines()
    try:
        if "installed" not in lines:
            installation.install(connection)
        if "code" not in lines:
            like = next((line for line in lines if line.startswith("/")), "")
            code.send(connection, parcel, place, like=like, rsync="rsync" in lines)
    except BaseException:
        with suppress(PacelineError):
            connection.call(f'{there}rm -f "$cache/{received}"\n')
        raise
    folder = f"{word(parcel.code.project)}/{word(command.folder)}"
    paths = f'export {env.SENT_FOLDER}="$(cd "$code"/{word(parcel.code.project)} && pwd -P)"\n'
    paths += f'export {env.RECEIVED}="$cache/{received}"\n'
    return (
        f'{setup_text(cluster)}{there}{place}mkdir -p "$code"/{folder} && cd "$code"/{folder} || exit\n'
        + "".join(f"export {name}={word(value)}\n" for name, value in command.variables.items())
        + paths
        + installation.RUN
    )


def _run(connection: Connection, script: str, *, reads_input: bool = False) -> int:
    """Run a script in this terminal; or copy its output as it comes, without what start-up files
    print before it.

    ssh reads all its input at once, so it gets ours only if the command there wants it.
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if all(stream is not None and stream.isatty() for stream in streams):
        return subprocess.run(connection.command(script, terminal=True), check=False).returncode
    sys.stdout.flush()
    mark = new_mark()
    has_input = reads_input and sys.stdin is not None and not sys.stdin.isatty()
    begin = f"echo {mark}\n"
    process = subprocess.Popen(
        connection.command(f"{begin}{script}"),
        stdin=None if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, b"")
        has_begun = any(line.endswith(f"{mark}\n".encode()) for line in lines)
        while part := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            sys.stdout.buffer.write(part)
            sys.stdout.flush()
        exit_code = process.wait()
    except BaseException:  # Ctrl-C, or nobody reads this any more
        process.terminate()
        process.wait()
        raise
    finally:
        process.stdout.close()
    if not has_begun:
        raise connection.broken()
    return exit_code
