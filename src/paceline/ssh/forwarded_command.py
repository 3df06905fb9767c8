"""Carry out a command of Paceline on a login node, as if it had been typed there."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.contract.quote import quote
from paceline.contract.verdict import INTERRUPTED_EXIT
from paceline.errors import ConnectionProblem
from paceline.launch.confirmation.submission import read_run
from paceline.ssh.code_push.delivery import Note, deliver
from paceline.ssh.code_push.project_code import Parcel
from paceline.ssh.connection import MAX_NOISE, Connection, new_mark, print_mark
from paceline.ssh.conversation import Conversation
from paceline.ssh.installation import Installation, is_new_output, recorded_installation
from paceline.ssh.remote.cache_cleanup import SUBMISSIONS
from paceline.ssh.request import ABSENT, FOLLOW, SSH_FAILED, UNSETTLED, Request, end_mark
from paceline.ssh.shell_text import SETUP_FAILED, describe_setup, explain_setup, setup_text, word
from paceline.ssh.unconfirmed import open_submission

WITHDRAW_TIMEOUT = 20.0  # seconds
# the command that takes piped input; what a caller pipes into others, such as a loop, is its own
READS_INPUT = "shell"


def forward(connection: Connection, request: Request, parcel: Parcel, *, note: Note) -> int:
    """Send a request and what it needs, carry it out, and return its exit code."""
    setup = _SetupOutput(connection, note)
    code = (_submit if request.submits else _command)(
        connection, request, parcel, note=note, heard=setup.hear
    )
    setup.end(code)
    return code


class _SetupOutput:
    """What `setup` prints. It is shown if it is new, and if the command fails: then it may say why."""

    def __init__(self, connection: Connection, note: Note) -> None:
        self.connection, self.note = connection, note
        self.hidden = ""

    def hear(self, said: str) -> None:
        if is_new_output(self.connection, said):
            self.note(describe_setup(said, name=self.connection.cluster.name))
        else:
            self.hidden = said

    def end(self, code: int) -> None:
        cluster = self.connection.cluster
        # after the request was sent: a shell that the user has opened may exit so, too
        if code == SETUP_FAILED:
            again = self.connection.call(setup_text(cluster.setup))
            if again.code == SETUP_FAILED:
                raise explain_setup(again.errors, name=cluster.name)
        if self.hidden and code not in (0, INTERRUPTED_EXIT):
            self.note(describe_setup(self.hidden, name=cluster.name))


def _command(
    connection: Connection, request: Request, parcel: Parcel, *, note: Note, heard: Note
) -> int:
    installation, name = deliver(connection, request, parcel, note=note, heard=heard)
    code = _carry_out(connection, installation, name, reads_input=request.args[:1] == [READS_INPUT])
    if code == SSH_FAILED and not _has_ended(connection, installation, name):
        raise _unanswered(connection)
    return code


def _submit(
    connection: Connection, request: Request, parcel: Parcel, *, note: Note, heard: Note
) -> int:
    """Carry out what submits jobs. If its answer is lost, the same command looks for its jobs before it submits any."""
    name = connection.cluster.name
    submission = open_submission(name, connection.cluster.host, request.args)
    jobs, are = ("job", "is one") if request.args[0] == "submit" else ("jobs", "are any")
    if submission.is_repeat:
        note(
            f"the answer to this command was lost earlier: {name} looks for its {jobs} before it submits anything"
        )
    try:
        identified = replace(request, submission=submission.id)
        installation, waiting = deliver(connection, identified, parcel, note=note, heard=heard)
    except BaseException as problem:
        submission.close() if submission.is_repeat else submission.confirm()
        if isinstance(problem, KeyboardInterrupt):
            note(
                _interrupted(name, jobs)
                if submission.is_repeat
                else "interrupted; nothing was submitted"
            )
        raise
    try:
        code = _carry_out(connection, installation, waiting)
        is_answer = code == 0 or _has_ended(connection, installation, waiting)
        if code == INTERRUPTED_EXIT and not is_answer:
            raise KeyboardInterrupt
        if not is_answer and code not in (ABSENT, SETUP_FAILED, UNSETTLED):
            raise _unanswered(connection)
    except KeyboardInterrupt:
        submission.close()
        note(_interrupted(name, jobs))
        raise
    except ConnectionProblem as problem:
        submission.close()
        repeat = "Repeat" if connection.is_open() else f"Type: paceline login {name}; then repeat"
        raise ConnectionProblem(
            f"{problem.message} No answer has arrived, so the {jobs} may or may not be in the queue.",
            hint=f"{repeat} the command: it reports the {jobs} if there {are}, and does not submit anything twice.",
        ) from None
    if is_answer or (code != UNSETTLED and not submission.is_repeat):
        submission.confirm()
        if code != 0 or not request.awaits:
            return 1 if code == ABSENT and not is_answer else code
        return _await(connection, request, parcel, submission.id, note=note)
    submission.close()  # an earlier job may be there, and nobody has looked for it
    return 1 if code in (UNSETTLED, ABSENT) else code


def _await(
    connection: Connection, request: Request, parcel: Parcel, submission: str, *, note: Note
) -> int:
    """Wait for the run of a submission that has its answer, and return the run's status as an exit code.

    From here on the same command, typed again, submits one more job.
    """
    name, follows = connection.cluster.name, request.awaits == FOLLOW
    run, way = "The run", f"paceline ps --on {quote(name)}"
    try:
        folder = _find_run(connection, submission)
        run = folder.name
        way = f"paceline {'logs -f' if follows else 'wait'} {quote(run)} --on {quote(name)}"
        args = ["submit", f"--await={folder}", *(["--follow"] if follows else [])]
        asked = Request(args, request.folder, request.code, request.variables)
        installation, waiting = deliver(connection, asked, parcel, note=note)
        code = _carry_out(connection, installation, waiting)
        known = (0, ABSENT, SETUP_FAILED, INTERRUPTED_EXIT)
        if code not in known and not _has_ended(connection, installation, waiting):
            raise _unanswered(connection)
    except ConnectionProblem as problem:
        login = "" if connection.is_open() else f"paceline login {quote(name)}; then: "
        raise ConnectionProblem(
            f"{problem.message} {run} is submitted and continues without this command.",
            hint=f"Type: {login}{way}",
        ) from None
    return code


def _find_run(connection: Connection, submission: str) -> Path:
    """Return the folder of the run that a submission has led to."""
    installation = recorded_installation(connection)
    path = f"{installation.cache}/{SUBMISSIONS}/{submission}" if installation is not None else ""
    found = read_run(connection.call(f"cat {word(path)}\n").output)
    if found is None:
        raise ConnectionProblem(f"{connection.cluster.name} does not say which run it is.")
    return found


def _interrupted(name: str, jobs: str) -> str:
    return f"interrupted; the {jobs} may be in the queue of {name}. To find out, repeat the command: nothing runs twice"


def _carry_out(
    connection: Connection, installation: Installation, name: str, *, reads_input: bool = False
) -> int:
    code = ABSENT
    try:
        if all(
            stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
        ):
            code = _run_in_terminal(connection, installation.command("run", name, "terminal"))
        else:
            code = _run_in_pipes(
                connection, installation.command("run", name, "pipes"), reads_input=reads_input
            )
    finally:
        if code in (ABSENT, SETUP_FAILED):
            _withdraw(connection, installation, name)
    return code


def _has_ended(connection: Connection, installation: Installation, name: str) -> bool:
    """Return whether a command that failed has ended by itself. If it was killed, its exit code is no answer."""
    path = word(f"{installation.cache}/{end_mark(name)}")
    try:
        return (
            connection.call(f"[ -e {path} ] && rm -f {path}\n", timeout=WITHDRAW_TIMEOUT).code == 0
        )
    except ConnectionProblem:
        return False


def _unanswered(connection: Connection) -> ConnectionProblem:
    """Return the error for a command that did not end by itself."""
    name = connection.cluster.name
    if not connection.is_open():
        return ConnectionProblem(
            f"The connection to {name} was lost, and the command there has ended with it.",
            hint=f"Jobs keep running. Type: paceline login {name}",
        )
    return ConnectionProblem(
        f"The command on {name} was cut off: it crashed, or something there killed it, such as a limit on memory.",
        hint=f"Try again. If it happens again, ask the administrators of {name} whether they limit memory.",
    )


def converse(
    connection: Connection, request: Request, parcel: Parcel, *, note: Note
) -> Conversation:
    """Send a request and what it needs, and return the conversation with the command that carries it out."""
    installation, name = deliver(connection, request, parcel, note=note)
    return Conversation(
        connection,
        installation.command("run", name, "pipes"),
        undo=lambda: _withdraw(connection, installation, name),
    )


def _withdraw(connection: Connection, installation: Installation, name: str) -> None:
    """Remove a request that perhaps nobody has taken: there may be secrets in it."""
    with suppress(ConnectionProblem):
        if connection.is_open():
            connection.call(
                f"rm -f {word(f'{installation.cache}/{name}')}\n", timeout=WITHDRAW_TIMEOUT
            )


def _run_in_terminal(connection: Connection, script: str) -> int:
    """The command has a terminal there too: its width, its colours and Ctrl-C are this one's."""
    process = subprocess.Popen(connection.command(script, terminal=True))
    with connection.watched(process):
        try:
            return process.wait()
        except KeyboardInterrupt:  # before ssh has begun to pass it on
            process.terminate()
            process.wait()
            raise


def _run_in_pipes(connection: Connection, script: str, *, reads_input: bool) -> int:
    """Copy the output as it comes, without what start-up files print before it.

    ssh reads all its input at once, so it gets ours only if the command there wants it.
    """
    mark = new_mark()
    has_input = reads_input and sys.stdin is not None and not sys.stdin.isatty()
    (output, its_output), (errors, its_errors) = socket.socketpair(), socket.socketpair()
    with its_output, its_errors:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            connection.command(f"{print_mark(mark)}{script}"),
            stdin=None if has_input else subprocess.DEVNULL,
            stdout=its_output.fileno(),
            stderr=its_errors.fileno(),
        )
    streams = [_Copy(output, sys.stdout, mark), _Copy(errors, sys.stderr, mark)]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with connection.watched(process, output, errors):
            for stream in streams:
                stream.start()
            for stream in streams:
                stream.join()
                # nobody reads this any more, so the command is of no use
                if stream.is_broken or stream.is_noisy:
                    process.terminate()
            code = process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            process.wait()
    if any(stream.is_broken for stream in streams):
        raise BrokenPipeError
    if any(stream.is_noisy for stream in streams):
        raise connection.noisy()
    if not streams[0].has_begun:
        raise connection.failure(code, streams[1].before.decode(errors="replace"))
    return code


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


class _Copy(threading.Thread):
    """Copies a stream of ssh's to one of ours, from the mark on."""

    def __init__(self, source: socket.socket, sink: Any, mark: str) -> None:
        super().__init__(daemon=True)
        self.source, self.sink, self.mark = source, sink, f"{mark}\n".encode()
        self.before, self.has_begun, self.is_broken, self.is_noisy = b"", False, False, False

    def run(self) -> None:
        try:
            while part := self.source.recv(1 << 16):
                if not self.has_begun:
                    self.before, begun, part = (self.before + part).partition(self.mark)
                    self.has_begun = bool(begun)
                    if not begun and len(self.before) > MAX_NOISE:
                        self.is_noisy = True
                        self.source.shutdown(socket.SHUT_RDWR)
                        return
                if part and self.sink is not None:
                    self.sink.buffer.write(part)
                    self.sink.buffer.flush()
        except OSError:
            self.is_broken = True
