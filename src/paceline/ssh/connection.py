"""One connection to a login node, opened by `paceline login` and shared by all commands until it is closed.

Everything is done by the user's own `ssh` with its own configuration: keys, agents, jump hosts,
certificates. Nothing but `open` ever asks for a password or a code.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import re
import secrets
import shlex
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.contract.files import open_without_waiting
from paceline.contract.run_folder import INTERRUPTED_EXIT
from paceline.errors import ConnectionProblem, EnvironmentProblem, UsageError
from paceline.spec.clusters import Cluster

IDLE = "12h"  # an unused connection closes after this long
CALL_TIMEOUT = 120.0  # seconds
CONTROL_TIMEOUT = 20.0  # for an answer of the process that keeps the connection open
SSH_FAILED = 255  # ssh's own exit code if the connection fails or a signal kills the command
SETUP_FAILED = 96  # exit code on the login node if commands of the user's `setup` have failed
MAX_BYTES = 120_000  # of a command: Linux passes at most 128 KiB to the login shell
MAX_SOCKET = 80  # bytes of a path: 104 on macOS, and ssh appends 17 while it opens the socket
# Nothing of the user's configuration may ask, forward a port or start a command of its own. Without
# a connection, ssh fails at once: it cannot open one through a ProxyCommand that does nothing.
QUIET = (
    "BatchMode=yes",
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "LogLevel=ERROR",
    "ProxyCommand=false",
)
# ssh starts no login shell, and many sites set the PATH in /etc/profile. Its output is no answer.
_PROFILE = (
    "before=$PATH; command -v sbatch >/dev/null 2>&1 || "
    "{ [ -r /etc/profile ] && . /etc/profile; PATH=$PATH:$before; } </dev/null >/dev/null 2>&1\n"
)
_MODULES = """\
command -v module >/dev/null 2>&1 || { [ -r /etc/profile ] && . /etc/profile; } </dev/null >/dev/null 2>&1
command -v module >/dev/null 2>&1 || for init in "${LMOD_PKG:-}/init/sh" "${MODULESHOME:-}/init/sh" \
    /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh \
    /usr/share/lmod/lmod/init/sh /usr/share/modules/init/sh /usr/share/Modules/init/sh; do
    if [ -r "$init" ]; then . "$init" </dev/null >/dev/null 2>&1; break; fi
done
"""


@dataclass(frozen=True)
class Answer:
    """What a command on the login node wrote and how it ended."""

    code: int
    output: bytes
    errors: str


class Connection:
    """The connection to a cluster's login node, whether it is open or not.

    `call` runs shell text there and returns its answer. `command` is the command line of ssh for
    everything else. `rsync` is one of rsync, in which `remote(path)` is a path there:

        subprocess.run(connection.rsync("-a", "--files-from=list", "folder/", connection.remote("to/")))

    Each exits with 255 if the connection is lost. Then raise `connection.broken()`.
    """

    def __init__(self, cluster: Cluster) -> None:
        if not hasattr(os, "getuid"):
            raise EnvironmentProblem(
                "OpenSSH for Windows cannot keep a connection open for other commands.",
                hint="Use Paceline inside WSL (`wsl --install`), where --on works as on Linux.",
            )
        self.cluster = cluster

    @property
    def is_users(self) -> bool:
        """Whether ssh's own configuration shares the connection: other programs may use it, too."""
        master, path = self._settings.get("controlmaster", "false"), self._control_path
        return master not in ("false", "no") and path != "none"

    @property
    def _control_path(self) -> str:
        return self._settings.get("controlpath", "none")

    @cached_property
    def socket(self) -> str:
        """The path of the control socket."""
        if self.is_users:
            return self._control_path
        return str(socket_folder() / hashlib.sha256(self.cluster.host.encode()).hexdigest()[:12])

    @cached_property
    def _settings(self) -> dict[str, str]:
        """What ssh's configuration says about the host."""
        done = _run(["ssh", "-G", "--", self.cluster.host], timeout=CONTROL_TIMEOUT)
        if done.code != 0:
            raise self._failed(done.errors)
        pairs = (line.partition(" ") for line in done.output.decode(errors="replace").splitlines())
        return {key: value for key, _, value in pairs}

    # -- opening and closing

    def is_open(self) -> bool:
        return os.path.exists(self.socket) and self._control("check") == 0

    def open(self) -> None:
        """Open the connection. ssh asks for passwords and codes in this terminal."""
        if os.path.exists(self.socket) and not self.is_open():
            Path(self.socket).unlink(missing_ok=True)  # of a process that was killed
        argv = ["ssh", "-M", *self._socket_option, "-f", "-N", "-T", "-o", "RemoteCommand=none"]
        if not self.is_users:
            argv += _options((f"ControlPersist={IDLE}", "ClearAllForwardings=yes"))
        if self._settings.get("connecttimeout", "none") in ("none", "0"):
            argv += _options(("ConnectTimeout=30",))
        if self._settings.get("serveraliveinterval", "0") == "0":
            argv += _options(("ServerAliveInterval=15", "ServerAliveCountMax=4"))
        try:
            code = subprocess.run([*argv, "--", self.cluster.host], check=False).returncode
        except FileNotFoundError:
            raise _no_ssh() from None
        if code != 0 or not self.is_open():
            host = self.cluster.host
            raise ConnectionProblem(
                f"ssh could not log in to {host}; its message is above.",
                hint=f"Check what `ssh {host}` says, your network and your VPN.",
            )

    def close(self) -> None:
        """Close the connection, and with it everything that runs through it."""
        self._control("exit")
        deadline = time.monotonic() + 10
        while os.path.exists(self.socket) and time.monotonic() < deadline:
            if self._control("check") != 0:
                Path(self.socket).unlink(missing_ok=True)
            time.sleep(0.02)

    def _control(self, what: str) -> int:
        argv = ["ssh", *self._socket_option, "-O", what, *_options(QUIET), "--", self.cluster.host]
        return _run(argv, timeout=CONTROL_TIMEOUT).code

    @property
    def _socket_option(self) -> list[str]:
        return ["-S", self.socket.replace("%", "%%")]

    def require(self) -> None:
        """Raise an error unless the connection is open."""
        if not self.is_open():
            raise self.broken()

    # -- use

    def shell(self, *, terminal: bool = False) -> list[str]:
        """Return `ssh` with what lets it use this connection alone; a host and a command follow."""
        return ["ssh", "-tt" if terminal else "-T", *_options(QUIET), *self._socket_option]

    def command(self, script: str, *, terminal: bool = False) -> list[str]:
        """Return the command line that runs a script of `sh` on the login node."""
        return [*self.shell(terminal=terminal), "--", self.cluster.host, shell_command(script)]

    def rsync(self, *arguments: str) -> list[str]:
        """Return the command line of rsync over this connection."""
        return ["rsync", "-e", shlex.join(self.shell()), *arguments]

    def remote(self, path: str) -> str:
        """Return a path there for rsync. Add the option `-s` if it may have spaces."""
        user, at, host = self.cluster.host.rpartition("@")
        return f"{user}{at}[{host}]:{path}" if ":" in host else f"{user}{at}{host}:{path}"

    def call(self, script: str, *, content: bytes = b"", timeout: float = CALL_TIMEOUT) -> Answer:
        """Run a script of `sh` there and return its answer, without what start-up files print."""
        mark = new_mark()
        done = _run(
            self.command(print_mark(mark) + script),
            content=content,
            timeout=timeout,
            name=self.cluster.name,
        )
        _, begun, output = done.output.partition(f"{mark}\n".encode())
        _, _, errors = done.errors.partition(f"{mark}\n")
        if done.code == SETUP_FAILED and begun:
            said, _, message = errors.strip().rpartition("paceline: error: ")
            raise EnvironmentProblem(f"{message.replace(' is above', f': {said.strip()}')}")
        if not begun or (done.code == SSH_FAILED and not self.is_open()):
            raise self.broken(done.errors)
        return Answer(done.code, output, errors)

    def send_tar(self, files: Mapping[str, Path], script: str) -> Answer:
        """Send files through a script of `sh` that unpacks them, as with `tar -xzf -`.

        For sides without rsync, and for what is sent once.
        """
        mark = new_mark()
        argv = self.command(print_mark(mark) + script)
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin is not None
            # what is wrong, the other side says
            with (
                suppress(BrokenPipeError),
                process.stdin,
                gzip.GzipFile(fileobj=process.stdin, mode="wb", compresslevel=5) as packed,
                tarfile.open(fileobj=packed, mode="w|") as archive,
            ):
                for name, path in files.items():
                    _add(archive, name, path)
            process.stdin = None
            output, errors = process.communicate()
        if f"{mark}\n".encode() not in output or process.returncode == SSH_FAILED:
            raise self.broken(errors.decode(errors="replace"))
        said = errors.decode(errors="replace").partition(f"{mark}\n")[2]
        return Answer(process.returncode, output, said)

    def broken(self, errors: str = "") -> ConnectionProblem:
        """Return the error for a connection that is not there, or through which nothing runs."""
        name = self.cluster.name
        if not self.is_open():
            return ConnectionProblem(
                f"You are not logged in to {name}.", hint=f"Type: paceline login {name}"
            )
        return self._failed(errors)

    def unclear(self) -> ConnectionProblem:
        """Return the error for an answer that is not what was asked for."""
        return ConnectionProblem(
            f"{self.cluster.name} gave an answer that Paceline does not understand.",
            hint="Try again. If it happens again, ask the cluster's administrators.",
        )

    def _failed(self, errors: str) -> ConnectionProblem:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        said = f": {lines[-1].rstrip('.')}" if lines else ""
        host = self.cluster.host
        return ConnectionProblem(
            f"ssh could not run a command on {host}{said}.",
            hint=f"Try `ssh {host} true`. A start-up file there, such as ~/.bashrc, may exit.",
        )


def socket_folder() -> Path:
    """Return the folder of sockets, and create it: only this user can open what is in it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "paceline"
    if not (runtime and os.path.isdir(runtime) and len(os.fsencode(folder)) + 17 <= MAX_SOCKET):
        folder = Path(f"/tmp/paceline-ssh-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EnvironmentProblem(
            f"{folder} is not a folder that only you can use.",
            hint="Remove it, or set XDG_RUNTIME_DIR to a folder of your own, with a short path.",
        )
    return folder


def close_all() -> int:
    """Close all connections that `paceline login` has opened; return how many."""
    open_ones = [path for path in socket_folder().iterdir() if path.is_socket()]
    for path in open_ones:
        _run(["ssh", "-S", str(path), "-O", "exit", "--", "any"], timeout=CONTROL_TIMEOUT)
        path.unlink(missing_ok=True)
    return len(open_ones)


def _run(argv: Sequence[str], *, content: bytes = b"", timeout: float, name: str = "ssh") -> Answer:
    """Run ssh and return what it wrote.

    The process that shares its connection keeps its pipes open while the other side is silent, so
    nobody waits for their end after a timeout.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)
    except FileNotFoundError:
        raise _no_ssh() from None
    with process:
        try:
            output, errors = process.communicate(content, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ConnectionProblem(
                f"{name} did not respond within {timeout:.0f} s.",
                hint="Check your network. Then close the connection, and open a new one:"
                " paceline login --close; paceline login",
            ) from None
        except BaseException:
            process.kill()
            raise
    return Answer(process.returncode, output, errors.decode(errors="replace"))


def _no_ssh() -> EnvironmentProblem:
    return EnvironmentProblem("There is no `ssh` command here.", hint="Install OpenSSH's client.")


def _options(settings: Iterable[str]) -> list[str]:
    return [part for setting in settings for part in ("-o", setting)]


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file as it is now, or a link; whose it is stays here."""
    member = archive.gettarinfo(path, name)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    if not member.isreg():
        archive.addfile(member)
        return
    with open(open_without_waiting(path), "rb") as file:
        member.size = os.fstat(file.fileno()).st_size
        archive.addfile(member, file)


# -- what ssh runs: every value that reaches another machine's shell goes through here


def word(text: str) -> str:
    """Return a word that a POSIX shell reads back byte for byte."""
    if "\0" in text:
        raise UsageError(
            f"There is a NUL character in {text!r}.", hint="Remove it: a shell cannot pass it on."
        )
    return shlex.quote(text)


def words(texts: Iterable[str]) -> str:
    return " ".join(word(text) for text in texts)


def shell_command(script: str) -> str:
    """Return a script for `sh` as a command line that bash, zsh, tcsh and fish understand alike.

    The login shell there may be any of these, and they differ in quotes, `!` and newlines. None of
    them changes the characters of base64. Ctrl-C in a terminal reaches that shell, too: without the
    trap, ssh would report its end like a broken connection.
    """
    encoded = base64.b64encode(os.fsencode(script)).decode()
    if len(encoded) > MAX_BYTES:
        raise UsageError(
            f"This command has {len(script):,} characters, too many for one on another machine.",
            hint="Put long arguments into a file of your project.",
        )
    on_interrupt = f'trap "trap - EXIT; exit {INTERRUPTED_EXIT}" INT'
    decode = 'script=$(echo "$1" | base64 -d) || exit'
    return f"""exec sh -c '{on_interrupt}; {decode}; shift; eval "$script"' sh {encoded}"""


def new_mark() -> str:
    """Return a line that no start-up file prints."""
    return f"paceline-{secrets.token_hex(12)}"


def print_mark(mark: str) -> str:
    """Return shell text that marks where the output of a command begins."""
    return f"echo {mark}\necho {mark} >&2\n"


def setup_text(cluster: Cluster) -> str:
    """Return shell text that makes Slurm known, as a login shell would, and runs `setup`.

    What `setup` prints is shown only if it fails; then the script ends with `SETUP_FAILED`.
    """
    if not cluster.setup:
        return _PROFILE
    uses_modules = re.search(r"\b(?:module|ml)\b", cluster.setup) is not None
    failed = (
        'code=$?; cat "$said" >&2; rm -f "$said"; '
        "printf 'paceline: error: `setup` of %s failed with exit code %s; "
        f"""its output is above.\\n' {word(cluster.name)} "$code" >&2; exit {SETUP_FAILED}"""
    )
    return (
        f"{_PROFILE}{_MODULES if uses_modules else ''}"
        "said=$(mktemp) || exit\n"
        f"trap {word(failed)} EXIT\n"
        f'eval {word(cluster.setup)} </dev/null >"$said" 2>&1 || exit\n'
        'trap - EXIT\nrm -f "$said"\n'
    )
