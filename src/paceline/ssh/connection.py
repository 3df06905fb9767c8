"""One connection to a login node, opened by `paceline login` and shared by all commands until `paceline logout`.

Everything is done by the user's own `ssh` with its own configuration: keys, agents, jump hosts, certificates.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from socket import SHUT_RDWR
from socket import socket as Socket

from paceline.errors import ConnectionProblem, EnvironmentProblem
from paceline.spec.clusters import Cluster
from paceline.ssh.control_socket import (
    ControlSocket,
    Login,
    forget_login,
    own_socket,
    record_login,
    require_multiplexing,
)
from paceline.ssh.request import SSH_FAILED
from paceline.ssh.shell_text import shell_command
from paceline.ssh.ssh_process import TooLong, as_text, explain, run, run_in_terminal

IDLE = "12h"  # an unused connection closes after this long
CALL_TIMEOUT = 120.0  # seconds
CONTROL_TIMEOUT = 20.0  # for an answer of the process that keeps the connection open
# between two questions whether the other side is still there, if ssh itself asks none
PROBE_PAUSE = 30.0
MAX_NOISE = 4 << 20  # bytes that start-up files may print before a command begins
# the same of the answer to a call, or of its errors, besides as much as it was sent
MAX_ANSWER = MAX_NOISE
# Nothing of the user's configuration may ask, forward a port or start a command in the background.
QUIET = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "LogLevel=ERROR",
)
# Settings with which a command would not start, or not read what it is sent. ssh before 8.7 does not know them, so they
# are only replaced where its configuration has them.
NEEDED = {"stdinnull": "no", "forkafterauthentication": "no", "sessiontype": "default"}


@dataclass(frozen=True)
class Answer:
    """What a command on the login node wrote and how it ended."""

    code: int
    output: bytes
    errors: str


class Connection:
    """The connection to a cluster's login node, whether it is open or not."""

    def __init__(self, cluster: Cluster) -> None:
        require_multiplexing()
        self.cluster = cluster

    @cached_property
    def socket(self) -> ControlSocket:
        """The user's own control socket if ssh's configuration names one for this host, else one of Paceline's."""
        settings = self._settings
        path = settings.get("controlpath", "none")
        if settings.get("controlmaster", "false") not in ("false", "no") and path != "none":
            return ControlSocket(path, is_users=True)
        return own_socket(self.cluster.host)

    @cached_property
    def _settings(self) -> dict[str, str]:
        """What ssh's configuration says about the host."""
        try:
            done = run(["ssh", "-G", "--", self.cluster.host], timeout=30)
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(
                "ssh hangs while reading its configuration.",
                hint=f"Try `ssh -G {self.cluster.host}`.",
            ) from None
        if done.returncode != 0:
            raise explain(as_text(done.stderr), name=self.cluster.name, host=self.cluster.host)
        pairs = (line.partition(" ") for line in as_text(done.stdout).splitlines())
        return {key: value for key, _, value in pairs}

    # -- opening and closing --------------------------------------------------------------------------------

    def is_open(self) -> bool:
        try:
            return self._answers()
        # the process that keeps the connection open is stopped, or hangs
        except subprocess.TimeoutExpired:
            return False

    def _answers(self) -> bool:
        return os.path.exists(self.socket.path) and self._control("check").returncode == 0

    def open(self) -> None:
        """Open the connection. ssh asks for passwords and codes in this terminal."""
        self._remove_stale_socket()
        argv = ["ssh", "-M", "-S", self.socket.option, "-f", "-N", "-T", "-o", "RemoteCommand=none"]
        if not self.socket.is_users:
            argv += ["-o", f"ControlPersist={IDLE}", "-o", "ClearAllForwardings=yes"]
        if self._settings.get("connecttimeout", "none") in ("none", "0"):
            argv += ["-o", "ConnectTimeout=30"]
        if not self._notices_silence:
            argv += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
        code, errors = run_in_terminal([*argv, "--", self.cluster.host])
        if code != 0 or not self.is_open():
            raise explain(errors, name=self.cluster.name, host=self.cluster.host)
        record_login(
            Login(self.cluster.name, self.cluster.host, self.socket.path, self.socket.is_users)
        )

    def close(self) -> None:
        """Close the connection, and with it everything that runs through it."""
        try:
            self._control("exit")
        except subprocess.TimeoutExpired:
            raise self._stuck() from None
        deadline = time.monotonic() + 10
        while os.path.exists(self.socket.path) and time.monotonic() < deadline:
            self._remove_stale_socket()
            time.sleep(0.02)
        forget_login(self.cluster.host)

    def _remove_stale_socket(self) -> None:
        """Remove the socket of a process that was killed: with it, ssh would open a connection that nobody can use."""
        try:
            if os.path.exists(self.socket.path) and self._control("check").returncode != 0:
                Path(self.socket.path).unlink(missing_ok=True)
        except subprocess.TimeoutExpired:
            raise self._stuck() from None

    def _stuck(self) -> ConnectionProblem:
        return ConnectionProblem(
            f"The ssh process of your connection to {self.cluster.name} did not respond within"
            f" {CONTROL_TIMEOUT:.0f} s.",
            hint=f"Try again. If the problem persists, kill that process: its command line contains {self.socket.path}",
        )

    def _control(self, what: str) -> subprocess.CompletedProcess[bytes]:
        argv = [
            "ssh",
            "-S",
            self.socket.option,
            "-O",
            what,
            *_options(QUIET),
            "--",
            self.cluster.host,
        ]
        return run(argv, timeout=CONTROL_TIMEOUT)

    # -- use ------------------------------------------------------------------------------------------------

    def command(self, script: str, *, terminal: bool = False) -> list[str]:
        """Return the command line that runs a script of `sh` on the login node. It never asks for anything.

        Without a connection it fails at once: with a `ProxyCommand` that does nothing, ssh cannot open one.
        """
        return [*self.shell(terminal=terminal), "--", self.cluster.host, shell_command(script)]

    def shell(self, *, terminal: bool = False) -> list[str]:
        """Return `ssh` with all that lets it use this connection, and only this one; a host and a command follow."""
        argv = ["ssh", "-tt" if terminal else "-T", *_options(QUIET), "-S", self.socket.option]
        replaced = [
            f"{key}={value}"
            for key, value in NEEDED.items()
            if self._settings.get(key, value) != value
        ]
        return [*argv, *_options(replaced), "-o", "ProxyCommand=false"]

    def rsync(self, *arguments: str) -> list[str]:
        """Return the command line of rsync over this connection; it asks for nothing.

        A path there is `connection.remote(path)`. rsync exits with 255 if the connection is lost:
        then raise `connection.lost()`, or `connection.not_open()` unless `connection.is_open()`.
        """
        return ["rsync", "-e", shlex.join(self.shell()), *arguments]

    def remote(self, path: str) -> str:
        """Return a path on the login node as an argument of rsync. Add `-s` if it has spaces."""
        user, at, host = self.cluster.host.rpartition("@")
        return f"{user}{at}[{host}]:{path}" if ":" in host else f"{user}{at}{host}:{path}"

    def require(self) -> None:
        """Raise an error unless the connection is open."""
        try:
            if self._answers():
                return
        except subprocess.TimeoutExpired:
            raise self._stuck() from None
        raise self.not_open()

    def not_open(self) -> ConnectionProblem:
        return ConnectionProblem(
            f"You are not logged in to {self.cluster.name}.",
            hint=f"Type: paceline login {self.cluster.name}",
        )

    def call(self, script: str, *, content: bytes = b"", timeout: float = CALL_TIMEOUT) -> Answer:
        """Run a script of `sh` on the login node and return its answer, without what start-up files print."""
        mark, limit = new_mark(), MAX_ANSWER + len(content)
        try:
            done = run(
                self.command(f"{print_mark(mark)}{script}"),
                content=content,
                timeout=timeout,
                limit=limit,
            )
        except subprocess.TimeoutExpired:
            raise self.silent(timeout) from None
        except TooLong as problem:
            raise (
                self.too_long(limit) if f"{mark}\n".encode() in problem.output else self.noisy()
            ) from None
        _, begun, output = done.stdout.partition(f"{mark}\n".encode())
        _, _, errors = done.stderr.partition(f"{mark}\n".encode())
        if not begun:
            raise self.failure(done.returncode, as_text(done.stderr))
        if done.returncode == SSH_FAILED and not self.is_open():
            raise self.lost()
        return Answer(done.returncode, output, as_text(errors))

    def silent(self, seconds: float) -> ConnectionProblem:
        """Return the error for a login node that no longer answers, although nothing says that it is gone."""
        name = self.cluster.name
        return ConnectionProblem(
            f"{self.cluster.host} did not respond within {seconds:.0f} s.",
            hint=f"Check your network, then open a new connection: paceline logout {name}; paceline login {name}",
        )

    def lost(self, known: str = "") -> ConnectionProblem:
        """Return the error for a connection that has ended; `known` says what that means for the command."""
        return ConnectionProblem(
            f"The connection to {self.cluster.name} was lost{f': {known}' if known else ''}.",
            hint=f"Type: paceline login {self.cluster.name}; then repeat the command.",
        )

    @contextmanager
    def watched(self, process: subprocess.Popen[bytes], *streams: Socket) -> Iterator[None]:
        """End a process of ssh and its streams if the login node no longer answers, and raise an error then.

        ssh itself does so within a minute, except over a connection of the user's own without `ServerAliveInterval`.
        """
        if not self.socket.is_users or self._notices_silence:
            yield
            return
        over, found = threading.Event(), list[ConnectionProblem]()

        def probe() -> None:
            while not over.wait(PROBE_PAUSE):
                try:
                    self.call("exit 0\n", timeout=PROBE_PAUSE)
                except ConnectionProblem as problem:
                    if not over.is_set():
                        found.append(problem)
                        process.terminate()
                        for stream in streams:  # the end of the process does not end them
                            # it is closed: the conversation is ending anyway
                            with suppress(OSError):
                                stream.shutdown(SHUT_RDWR)
                    return

        prober = threading.Thread(target=probe, daemon=True)
        prober.start()
        try:
            yield
        finally:
            over.set()
            if found:
                raise found[0]

    @property
    def _notices_silence(self) -> bool:
        """Whether ssh's configuration asks a silent login node for a sign of life."""
        return self._settings.get("serveraliveinterval", "0") != "0"

    def noisy(self) -> ConnectionProblem:
        """Return the error for start-up files that print and print, so that no command begins."""
        return ConnectionProblem(
            f"The login shell of {self.cluster.name} printed more than {MAX_NOISE >> 20} MB before it ran a command.",
            hint=f"Try `ssh {self.cluster.host} true`. A start-up file there, such as ~/.bashrc, may print endlessly.",
        )

    def too_long(self, limit: int) -> ConnectionProblem:
        """Return the error for an answer that does not end."""
        return ConnectionProblem(
            f"The answer of {self.cluster.name} is too long: more than {limit >> 20} MB.",
            hint="Probably a start-up file of the shell there prints endlessly, such as ~/.bashrc, or a command of"
            f" `setup`. Try `ssh {self.cluster.host} true`.",
        )

    def unclear(self) -> ConnectionProblem:
        """Return the error for an answer that is not what was agreed."""
        return ConnectionProblem(
            f"{self.cluster.name} gave an answer that Paceline does not understand.",
            hint="Try again. If it happens again, ask who runs the cluster: something there has changed the answer.",
        )

    def failure(self, code: int, errors: str) -> ConnectionProblem:
        """Return the error for a command that did not even start."""
        if code == SSH_FAILED and not self.is_open():
            return self.not_open()
        if code == SSH_FAILED:
            return explain(errors, name=self.cluster.name, host=self.cluster.host)
        said = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
        return ConnectionProblem(
            f"The login shell of {self.cluster.host} did not run a command: {said[0]}.",
            hint=f"Try `ssh {self.cluster.host} true`. A start-up file there, such as ~/.bashrc, may exit.",
        )


def new_mark() -> str:
    """Return a line that no start-up file prints."""
    return f"paceline-{secrets.token_hex(12)}"


def print_mark(mark: str) -> str:
    """Return shell text that marks where the output of a command begins: start-up files may print before it."""
    return f"echo {mark}\necho {mark} >&2\n"


def _options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("-o", setting)]
