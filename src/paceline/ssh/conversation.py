"""A dialogue with a program on the login node: lines in both directions, over the connection."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.ssh.connection import Connection, new_mark, print_mark

MAX_LINE = 64 << 20  # bytes: a line names each file of a project


class Conversation:
    """Runs a script of `sh` on the login node: `send` and `read_line` until `close`, which returns its exit code.

    `input` is what the program there reads, `output` what it writes. If it does not start, `undo` is called.
    """

    def __init__(
        self, connection: Connection, script: str, undo: Callable[[], None] = lambda: None
    ) -> None:
        self.connection, self._mark, self._undo = connection, new_mark(), undo
        self._script = f"{print_mark(self._mark)}{script}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Conversation:
        # Sockets rather than pipes: what waits for them can be ended from this side, too. A session of its own: Ctrl-C
        # in a terminal is for this process, which ends the conversation when it has to.
        (mine, theirs), (output, its_output) = socket.socketpair(), socket.socketpair()
        with theirs, its_output:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                self.connection.command(self._script),
                stdin=theirs.fileno(),
                stdout=its_output.fileno(),
                stderr=self._errors,
                start_new_session=True,
            )
        self.input, self.output, self._sockets = (
            mine.makefile("wb"),
            output.makefile("rb"),
            (mine, output),
        )
        mark = self._mark.encode()
        while line := self.output.readline():
            if line.rstrip(b"\n").endswith(mark):  # start-up files may print before it
                return self
        self.close()
        self._undo()
        raise self.connection.broken(self.errors)

    def __exit__(self, *_: Any) -> None:
        self.end()
        self.close()
        self._errors.close()

    @property
    def errors(self) -> str:
        """What the program wrote to stderr."""
        descriptor = self._errors.fileno()
        # ssh writes at the position that it shares
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        before, mark, after = content.decode(errors="replace").partition(f"{self._mark}\n")
        return after if mark else before

    def send(self, content: bytes) -> None:
        try:
            self.input.write(content)
            self.input.flush()
        except ConnectionError:
            pass  # the program has ended; its answer says why

    def read_line(self, limit: int = MAX_LINE) -> bytes:
        """Return the next line; empty if the program has ended. Raises ConnectionProblem if it does not end."""
        line = self.output.readline(limit + 1)
        if len(line) > limit:
            self.end()
            raise self.connection.broken()
        return line

    def end(self) -> None:
        """End the conversation at once; another thread may be reading."""
        if self._process.poll() is None:
            self._process.terminate()

    def close(self) -> int:
        """End what is sent, and wait for the program."""
        with suppress(OSError):  # it may have ended already
            self.input.close()
        self._sockets[0].close()
        code = self._process.wait()
        self.output.close()
        self._sockets[1].close()
        return code
