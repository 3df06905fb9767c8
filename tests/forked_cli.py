"""`paceline` commands for tests: one server imports the command line once and forks each command from itself.

A command that starts by itself spends most of its time on imports. Tests of how it starts, and those of the guides,
start it that way.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline import cli
from paceline.__main__ import __file__ as main_file
from paceline.__main__ import main
from paceline.contract import process

Completed = subprocess.CompletedProcess[str]
# What the commands import when they need it.
LATER = (
    "concurrent.futures", "multiprocessing.context", "psutil", "pydantic.type_adapter", "rich.progress", "rich.table",
    "paceline.cli.mirror_server",
)  # fmt: skip
PATHS = "PYTHONPATH"
LIGHT_TORCH = str(Path(__file__).parent / "light_torch")  # commands do not import torch
AT_START = ("PYTHON", "LC_", "LANG")  # Python reads these variables when it starts
MAX_REQUEST = 1 << 20


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(AT_START) and name != PATHS}


class Commands:
    """`forked_cli(["ps"], cwd=..., env=...)` runs `paceline ps` as `subprocess.run` does, with its output as text."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="paceline-cli-")
        self.address = str(Path(self.folder.name) / "socket")
        self.read_at_start = read_at_start(os.environ)
        # Now, while no test is running: the guard attributes later processes to tests.
        self.server = subprocess.Popen(
            [sys.executable, "-m", __name__, self.address], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.server.stdout
        assert self.server.stdout.readline() == b"ready\n", "the server of commands did not start"

    def __call__(
        self, args: list[str], *, cwd: Path, env: dict[str, str], timeout: float = 120, input: str = ""
    ) -> Completed:
        if self.starts_differently(env):
            return subprocess.run(
                [sys.executable, "-m", "paceline", *args],
                cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True, input=input,
            )  # fmt: skip
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
            connection.connect(self.address)
            return self._run(connection, args, {"args": args, "cwd": str(cwd), "env": env}, timeout, input)

    def starts_differently(self, variables: dict[str, str]) -> bool:
        """Return whether a process with these variables has another start than the server had."""
        others = {*split_paths(variables)} - {LIGHT_TORCH}
        customized = any(Path(path, "sitecustomize.py").exists() for path in others)
        return customized or read_at_start(variables) != self.read_at_start

    def _run(
        self, connection: socket.socket, args: list[str], request: dict[str, Any], timeout: float, given: str
    ) -> Completed:
        (their_input, given_to), (read_from, their_output), (read_also, their_errors) = (os.pipe() for _ in range(3))
        theirs = [their_input, their_output, their_errors]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))
        connection.sendmsg([json.dumps(request).encode()], [rights])
        for end in theirs:
            os.close(end)
        answers = connection.makefile()
        pid = int(answers.readline())
        texts = {"stdout": "", "stderr": ""}

        def read(name: str, descriptor: int) -> None:
            with open(descriptor, errors="replace") as stream:
                texts[name] = stream.read()

        def write() -> None:
            with suppress(BrokenPipeError), open(given_to, "w") as stream:
                stream.write(given)

        todo = ((read, "stdout", read_from), (read, "stderr", read_also), (write,))
        threads = [threading.Thread(target=what, args=args, daemon=True) for what, *args in todo]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0, deadline - time.monotonic()))
            if thread.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(["paceline", *args], timeout, *texts.values())
        connection.settimeout(max(1, deadline - time.monotonic()))
        return subprocess.CompletedProcess(["paceline", *args], int(answers.readline()), **texts)

    def close(self) -> None:
        """Stop the server now, so that it ends before the session does."""
        self.server.terminate()
        self.server.wait()
        assert self.server.stdout
        self.server.stdout.close()
        self.folder.cleanup()


def preload() -> None:
    gc.disable()
    for name in (*(module for module, _ in cli.COMMANDS.values()), *LATER):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(16)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    attend(connection)


def attend(connection: socket.socket) -> None:
    """Fork a command, send its process ID and then its exit code. Returns in the process of the command alone."""
    text, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
    request = json.loads(text)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        connection.send(f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):  # the test has given up
            connection.send(f"{code}\n".encode())
        os._exit(0)
    connection.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    become(request["args"], request["cwd"], request["env"])


def become(args: list[str], cwd: str, variables: dict[str, str]) -> None:
    """Be as a process that was started for this command."""
    before = split_paths(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.path[: 1 + len(before)] = [cwd, *split_paths(os.environ)]
    sys.argv = [main_file, *args]
    random.seed()


def split_paths(variables: Mapping[str, str]) -> list[str]:
    return [path for path in variables.get(PATHS, "").split(os.pathsep) if path]


if __name__ == "__main__":
    process.die_with_parent(os.getppid(), signal.SIGTERM)
    preload()
    serve(sys.argv[1])
    process.outlive_parent()
    main()
