"""One connection to a login node, opened by `paceline login` and shared by all commands until `paceline logout`.

Everything is done by the user's own `ssh` with its own configuration: keys, agents, jump hosts, certificates.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.cluster.ssh.clusters import Cluster
from paceline.cluster.ssh.control_socket import ControlSocket, Login, forget_login, own_socket, record_login
from paceline.cluster.ssh.remote_command import shell_command
from paceline.cluster.ssh.ssh_errors import explain
from paceline.errors import ConnectionProblem, EnvironmentProblem

IDLE = "12h"  # an unused connection closes after this long
SSH_FAILED = 255  # ssh's own exit code if the connection fails
CALL_TIMEOUT = 120.0
# Nothing of the user's configuration may ask, forward a port or start a command in the background.
QUIET = (
    "BatchMode=yes", "ControlMaster=no", "ClearAllForwardings=yes", "RemoteCommand=none", "PermitLocalCommand=no",
    "LogLevel=ERROR",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a command on the login node wrote and how it ended."""

    code: int
    output: bytes
    errors: str


class Connection:
    """The connection to a cluster's login node, whether it is open or not."""

    def __init__(self, cluster: Cluster) -> None:
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
        done = _run(["ssh", "-G", "--", self.cluster.host], timeout=30)
        if done.returncode != 0:
            raise explain(_text(done.stderr), name=self.cluster.name, host=self.cluster.host)
        pairs = (line.partition(" ") for line in _text(done.stdout).splitlines())
        return {key: value for key, _, value in pairs}

    # -- opening and closing --------------------------------------------------------------------------------

    def is_open(self) -> bool:
        return not multiplexes() or self._answers()

    def _answers(self) -> bool:
        return os.path.exists(self.socket.path) and self._control("check").returncode == 0

    def open(self) -> None:
        """Open the connection. ssh asks for passwords and codes in this terminal."""
        _require_multiplexing()
        argv = ["ssh", "-M", "-S", self.socket.option, "-f", "-N", "-T", "-o", "RemoteCommand=none"]
        if not self.socket.is_users:
            argv += ["-o", f"ControlPersist={IDLE}", "-o", "ClearAllForwardings=yes"]
        if self._settings.get("connecttimeout", "none") in ("none", "0"):
            argv += ["-o", "ConnectTimeout=30"]
        if self._settings.get("serveraliveinterval", "0") == "0":
            argv += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
        code, errors = _run_in_terminal([*argv, "--", self.cluster.host])
        if code != 0 or not self.is_open():
            raise explain(errors, name=self.cluster.name, host=self.cluster.host)
        record_login(Login(self.cluster.name, self.cluster.host, self.socket.path, self.socket.is_users))

    def close(self) -> None:
        """Close the connection, and with it everything that runs through it."""
        self._control("exit")
        deadline = time.monotonic() + 10
        while os.path.exists(self.socket.path) and time.monotonic() < deadline:
            time.sleep(0.02)
        forget_login(self.cluster.host)

    def _control(self, what: str) -> subprocess.CompletedProcess[bytes]:
        argv = ["ssh", "-S", self.socket.option, "-O", what, *_options(QUIET), "--", self.cluster.host]
        return _run(argv, timeout=20)

    # -- use ------------------------------------------------------------------------------------------------

    def command(self, script: str, *, terminal: bool = False) -> list[str]:
        """Return the command line that runs a script of `sh` on the login node. It never asks for anything.

        Without a connection it fails at once: with a `ProxyCommand` that does nothing, ssh cannot open one.
        """
        argv = ["ssh", "-tt" if terminal else "-T", *_options(QUIET)]
        if multiplexes():
            argv += ["-S", self.socket.option, "-o", "ProxyCommand=false"]
        return [*argv, "--", self.cluster.host, shell_command(script)]

    def require(self) -> None:
        """Raise an error unless the connection is open."""
        if not self.is_open():
            raise self.not_open()

    def not_open(self) -> ConnectionProblem:
        return ConnectionProblem(
            f"You are not logged in to {self.cluster.name}.", hint=f"Type: paceline login {self.cluster.name}"
        )

    def call(self, script: str, *, content: bytes = b"", timeout: float = CALL_TIMEOUT) -> Answer:
        """Run a script of `sh` on the login node and return its answer, without what start-up files print."""
        mark = new_mark()
        try:
            done = _run(self.command(f"{print_mark(mark)}{script}"), content=content, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ConnectionProblem(
                f"{self.cluster.host} did not answer within {timeout:.0f} s.",
                hint=f"Is your network up? Open a new connection: paceline logout {self.cluster.name};"
                f" paceline login {self.cluster.name}",
            ) from None
        _, begun, output = done.stdout.partition(f"{mark}\n".encode())
        _, _, errors = done.stderr.partition(f"{mark}\n".encode())
        if not begun:
            raise self.failure(done.returncode, _text(done.stderr))
        return Answer(done.returncode, output, _text(errors))

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


def multiplexes() -> bool:
    """Return whether ssh can share one connection; OpenSSH for Windows cannot."""
    return os.name == "posix"


def _require_multiplexing() -> None:
    if not multiplexes():
        raise EnvironmentProblem(
            "OpenSSH for Windows cannot keep a connection open for other commands.",
            hint="Use Paceline inside WSL. With a key or an agent and no second factor, commands work without a login.",
        )


def _options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("-o", setting)]


def _run(argv: Sequence[str], *, content: bytes = b"", timeout: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(argv, input=content, capture_output=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise _no_ssh() from None


def _run_in_terminal(argv: Sequence[str]) -> tuple[int, str]:
    """Run ssh with this terminal; return its exit code and what it wrote to stderr, which is also shown.

    ssh goes on in the background with the same stderr, so the end of the command counts, not the end of its output.
    """
    try:
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
    except FileNotFoundError:
        raise _no_ssh() from None
    assert process.stderr is not None
    descriptor, seen = process.stderr.fileno(), bytearray()

    def copy() -> None:
        while part := os.read(descriptor, 65536):
            seen.extend(part)
            sys.stderr.write(part.decode(errors="replace"))
            sys.stderr.flush()

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    reader.join(0.3)
    return code, _text(bytes(seen))


def _no_ssh() -> EnvironmentProblem:
    return EnvironmentProblem("There is no `ssh` command here.", hint="Install OpenSSH's client.")


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
