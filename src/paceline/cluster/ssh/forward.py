"""Carry out a command of Paceline on a login node, as if it had been typed there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import IO, Any

from paceline.cluster.ssh.code import Parcel, describe_size, write_contents
from paceline.cluster.ssh.connection import SSH_FAILED, Connection, new_mark, print_mark
from paceline.cluster.ssh.conversation import Conversation
from paceline.cluster.ssh.installation import ABSENT, Installation, install, recorded_installation
from paceline.cluster.ssh.request import Request
from paceline.errors import ConnectionProblem, EnvironmentProblem

NOTED_SIZE = 5 << 20  # bytes: more than this is named before it is sent

Note = Callable[[str], None]


def forward(connection: Connection, request: Request, parcel: Parcel, *, note: Note) -> int:
    """Send a request and what it needs, carry it out, and return its exit code."""
    installation = recorded_installation(connection)
    name = _deliver(connection, installation, request, parcel, note) if installation is not None else None
    if installation is None or name is None:
        installation = install(connection, note)
        name = _deliver(connection, installation, request, parcel, note)
    if name is None:
        raise ConnectionProblem(
            f"Paceline disappears from {connection.cluster.name} as soon as it is installed.",
            hint=f"Is {installation.cache} the same folder for every login?",
        )
    if all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        code = _run_in_terminal(connection, installation.command("run", name, "terminal"))
    else:
        code = _run_in_pipes(connection, installation.command("run", name, "pipes"))
    if code == SSH_FAILED and not connection.is_open():
        raise ConnectionProblem(
            f"The connection to {connection.cluster.name} was lost, and the command there has ended with it.",
            hint=f"Jobs go on. Type: paceline login {connection.cluster.name}",
        )
    return code


def _deliver(
    connection: Connection, installation: Installation, request: Request, parcel: Parcel, note: Note
) -> str | None:
    """Hand a request over; return the name under which it waits there, or None if Paceline is not there."""
    with Conversation(connection, installation.command("receive")) as talk:
        talk.send(f"{request.to_json()}\n".encode())
        answer = _read_answer(talk)
        if answer is not None and "missing" in answer:
            wanted = answer["missing"]
            size, largest = describe_size(parcel, wanted)
            if size > NOTED_SIZE:
                note(f"sending {size / 2**20:,.1f} MB of code to {connection.cluster.name}: {largest}")
            if wanted:
                try:
                    write_contents(parcel, wanted, talk.input)
                except BrokenPipeError:
                    pass  # the answer says why
            answer = _read_answer(talk)
        if answer is None:
            code = talk.close()
            if code == ABSENT:
                return None
            raise connection.failure(code, talk.errors)
    if "error" in answer:
        raise EnvironmentProblem(
            f"{connection.cluster.name} cannot take your code: {answer['error']}", hint=str(answer.get("hint", ""))
        )
    return str(answer["request"])


def _read_answer(talk: Conversation) -> dict[str, Any] | None:
    line = talk.read_line()
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


# -- the command -----------------------------------------------------------------------------------------------


def _run_in_terminal(connection: Connection, script: str) -> int:
    """The command has a terminal there too: its width, its colours and Ctrl-C are this one's."""
    process = subprocess.Popen(connection.command(script, terminal=True))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # ssh passes it on
            continue


def _run_in_pipes(connection: Connection, script: str) -> int:
    """Copy the output as it comes, without what start-up files print before it."""
    mark = new_mark()
    has_input = sys.stdin is not None and not sys.stdin.isatty()
    process = subprocess.Popen(
        connection.command(f"{print_mark(mark)}{script}"),
        stdin=None if has_input else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    streams = [_Copy(process.stdout, sys.stdout, mark), _Copy(process.stderr, sys.stderr, mark)]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
            if stream.is_broken:  # nobody reads this any more, so the command is of no use
                process.terminate()
        code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            process.wait()
    if any(stream.is_broken for stream in streams):
        raise BrokenPipeError
    if not streams[0].has_begun:
        raise connection.failure(code, streams[1].before.decode(errors="replace"))
    return code


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


class _Copy(threading.Thread):
    """Copies a stream of ssh's to one of ours, from the mark on."""

    def __init__(self, source: IO[bytes], sink: Any, mark: str) -> None:
        super().__init__(daemon=True)
        self.source, self.sink, self.mark = source, sink, f"{mark}\n".encode()
        self.before, self.has_begun, self.is_broken = b"", False, False

    def run(self) -> None:
        try:
            while part := os.read(self.source.fileno(), 1 << 16):
                if not self.has_begun:
                    self.before, begun, part = (self.before + part).partition(self.mark)
                    self.has_begun = bool(begun)
                if part and self.sink is not None:
                    self.sink.buffer.write(part)
                    self.sink.buffer.flush()
        except OSError:
            self.is_broken = True
