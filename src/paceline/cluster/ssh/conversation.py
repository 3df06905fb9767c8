"""A program on the login node that one talks to: lines there and back, over the connection."""

from __future__ import annotations

import subprocess
import tempfile
from typing import IO, Any

from paceline.cluster.ssh.connection import Connection, new_mark, print_mark


class Conversation:
    """Runs a script of `sh` on the login node: `send` and `read_line` until `close`, which returns its exit code."""

    def __init__(self, connection: Connection, script: str) -> None:
        self.connection, self._mark = connection, new_mark()
        self._script = f"{print_mark(self._mark)}{script}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Conversation:
        self._process = subprocess.Popen(
            self.connection.command(self._script),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        mark = self._mark.encode()
        while line := self._output.readline():
            if line.rstrip(b"\n").endswith(mark):  # start-up files may print before it
                return self
        code = self.close()
        raise self.connection.failure(code, self.errors)

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self.close()
        self._errors.close()

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def input(self) -> IO[bytes]:
        """What the program reads."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def errors(self) -> str:
        """What the program wrote to stderr."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return text.partition(f"{self._mark}\n")[2] or text

    def send(self, content: bytes) -> None:
        try:
            self.input.write(content)
            self.input.flush()
        except BrokenPipeError:
            pass  # the program has ended; its answer says why

    def read_line(self) -> bytes:
        """Return the next line; empty if the program has ended."""
        return self._output.readline()

    def close(self) -> int:
        """End what is sent, and wait for the program."""
        try:
            self.input.close()
        except BrokenPipeError:
            pass
        code = self._process.wait()
        self._output.close()
        return code
