"""`paceline` commands for tests: one server imports the command line once and forks each command from itself.

Most of a command's start is imports. Tests of the start itself run `python -m paceline`, and so do all tests if the
variable REAL_COMMANDS is set, as `make test-all` does.

A forked command has the limits, the umask and the hash seed of the server, not those of the test.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from paceline.__main__ import __file__ as main_file
from paceline.__main__ import main
from paceline.cli import command_table
from paceline.contract import process

Completed = subprocess.CompletedProcess[str]
ROOT = Path(__file__).parent.parent
# What the commands import when they need it.
LATER = (
    "concurrent.futures",
    "multiprocessing.context",
    "psutil",
    "pydantic.type_adapter",
    "rich.progress",
    "rich.table",
)
PATHS = "PYTHONPATH"
LIGHT_TORCH = str(ROOT / "tests" / "light_torch")  # commands do not import torch
AT_START = ("PYTHON", "LC_", "LANG", "TZ")  # Python reads these variables when it starts
MAX_REQUEST = 1 << 20
# the process ID of each, by its address, which is in the command line of all its forks
servers: dict[str, int] = {}


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(AT_START) and name != PATHS
    }


def split_paths(variables: Mapping[str, str]) -> list[str]:
    return [path for path in variables.get(PATHS, "").split(os.pathsep) if path]


class Commands:
    """`forked_cli(["ps"], cwd=..., env=...)` runs `paceline ps` as `subprocess.run` does, with its output as text."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="paceline-cli-")
        self.address = str(Path(self.folder.name) / "socket")
        self.read_at_start = read_at_start(os.environ)
        # Now, while no test is running: the guard attributes later processes to tests.
        self.server = subprocess.Popen(
            [sys.executable, "-m", __name__, self.address, str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.server.stdout
        assert self.server.stdout.readline() == b"ready\n", "the server of commands did not start"
        servers[self.address] = self.server.pid

    def __call__(
        self,
        args: list[str],
        *,
        cwd: Path,
        env: dict[str, str],
        timeout: float = 120,
        input: str = "",
    ) -> Completed:
        if os.environ.get("REAL_COMMANDS") or self.starts_differently(env):
            return subprocess.run(
                [sys.executable, "-m", "paceline", *args],
                cwd=cwd,
                env=env,
                timeout=timeout,
                text=True,
                capture_output=True,
                input=input,
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            streams = self.start(connection, args, cwd, env, input)
            try:
                code = streams.wait(time.monotonic() + timeout)
            except TimeoutError:
                raise subprocess.TimeoutExpired(
                    ["paceline", *args], timeout, *streams.texts()
                ) from None
        return subprocess.CompletedProcess(["paceline", *args], code, *streams.texts())

    def start(
        self,
        connection: socket.socket,
        args: list[str],
        cwd: Path,
        env: dict[str, str],
        given: str = "",
    ) -> Streams:
        """Start a command, which ends with the connection."""
        assert cwd.is_dir(), f"no folder {cwd}"
        request = json.dumps({"args": args, "cwd": str(cwd), "env": env}).encode()
        assert len(request) < MAX_REQUEST, "more than the server reads"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
        connection.connect(self.address)
        return Streams(connection, request, given.encode())

    def starts_differently(self, variables: dict[str, str]) -> bool:
        """Return whether a process with these variables would start differently from the server."""
        others = {*split_paths(variables)} - {LIGHT_TORCH}
        customized = any(Path(path, "sitecustomize.py").exists() for path in others)
        return customized or read_at_start(variables) != self.read_at_start

    def close(self) -> None:
        """Stop the server before the session ends."""
        del servers[self.address]
        self.server.terminate()
        self.server.wait()
        assert self.server.stdout
        self.server.stdout.close()
        self.folder.cleanup()


class Streams:
    """A command's input, output and errors. The command ends if the connection to its server does."""

    def __init__(self, connection: socket.socket, request: bytes, given: bytes) -> None:
        self.connection = connection
        self.parts: tuple[list[bytes], list[bytes]] = ([], [])
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        with ExitStack() as closing:
            for end in theirs:
                closing.callback(os.close, end)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))
            connection.sendmsg([request], [rights])
        todo: list[tuple[Callable[..., None], int, Any]]
        todo = [
            (write, pipes[0][1], given),
            (read, pipes[1][0], self.parts[0]),
            (read, pipes[2][0], self.parts[1]),
        ]
        self.threads = [
            threading.Thread(target=what, args=args, daemon=True) for what, *args in todo
        ]
        for thread in self.threads:
            thread.start()

    def wait(self, deadline: float) -> int:
        """Wait until the output ends, and the command too; return its exit code."""
        for thread in self.threads:
            thread.join(max(0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError
        self.connection.settimeout(max(0.1, deadline - time.monotonic()))
        code = self.connection.recv(100)
        assert code, "the server of commands failed"
        return int(code)

    def texts(self) -> list[str]:
        return [
            b"".join(parts).decode().replace("\r\n", "\n").replace("\r", "\n")
            for parts in self.parts
        ]


def read(end: int, parts: list[bytes]) -> None:
    with open(end, "rb", buffering=0) as stream:
        while part := stream.read(65536):
            parts.append(part)


def write(end: int, content: bytes) -> None:
    with suppress(BrokenPipeError), open(end, "wb") as stream:
        stream.write(content)


# -- the server ---------------------------------------------------------------------------------------------


def preload() -> None:
    """Import all commands and what they import later."""
    gc.disable()
    commands = (module for module, _ in command_table.COMMANDS.values())
    for name in (*commands, *command_table.SERVERS.values(), *LATER):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(address: str) -> None:
    """Fork a process for each connection. Returns in the process of a command alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(16)
        print("ready", flush=True)
        # the kernel reaps the processes that wait for commands
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    attend(connection)


def attend(connection: socket.socket) -> None:
    """Fork a command and send its exit code; kill it if the test is gone. Returns in the process of the command."""
    text, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
    if not fds:  # the test has ended before it asked for anything
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(json.loads(text), fds)
        return
    for fd in fds:
        os.close(fd)
    threading.Thread(target=end_with_the_test, args=(pid, connection), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.send(str(code).encode())
    os._exit(0)


def end_with_the_test(pid: int, connection: socket.socket) -> None:
    with suppress(OSError):
        connection.recv(1)  # nothing comes but the end
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """Look like a process that was started for this command."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    before, cwd = split_paths(os.environ), str(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(cwd)
    sys.path[: 1 + len(before)] = [cwd, *split_paths(os.environ)]
    sys.argv = [main_file, *request["args"]]


if __name__ == "__main__":
    process.die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    preload()
    serve(sys.argv[1])
    main()
