"""The socket of a connection: where it is, and whose. Its folder is private, and its path short enough for a socket."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem

MAX_PATH = 80  # bytes: 104 on macOS, and ssh appends 17 while it opens the socket

_OWN_FOLDER = "Set XDG_RUNTIME_DIR to a folder of your own, with a short path."


@dataclass(frozen=True)
class ControlSocket:
    """`is_users` means that ssh's own configuration names it: it may be in use for other things than Paceline."""

    path: str
    is_users: bool = False

    @property
    def option(self) -> str:
        """The value of `-S`, in which ssh expands `%`."""
        return self.path.replace("%", "%%")


@dataclass(frozen=True)
class Login:
    """A connection that `paceline login` has opened, as recorded until `paceline logout`."""

    cluster: str
    host: str
    socket: str
    is_users: bool


def require_multiplexing() -> None:
    """Raise an error where ssh cannot share one connection: OpenSSH for Windows cannot."""
    if not hasattr(os, "getuid"):
        raise EnvironmentProblem(
            "OpenSSH for Windows cannot keep a connection open for other commands.",
            hint="Use Paceline inside WSL (`wsl --install`), where --on works as on Linux.",
        )


def own_socket(host: str) -> ControlSocket:
    return ControlSocket(str(socket_folder() / _key(host)))


def socket_folder() -> Path:
    """Return the folder of sockets, and create it: only this user can open what is in it."""
    require_multiplexing()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "paceline"
    if not (runtime and os.path.isdir(runtime) and len(os.fsencode(folder)) + 17 <= MAX_PATH):
        folder = Path(f"/tmp/paceline-ssh-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as problem:
        raise EnvironmentProblem(
            f"Cannot create {folder} for connections: {problem.strerror}.", hint=_OWN_FOLDER
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EnvironmentProblem(
            f"{folder} is not a folder that only you can use.",
            hint=f"Remove it, or s{_OWN_FOLDER[1:]}",
        )
    return folder


def record_login(login: Login) -> None:
    write_atomically(_record(login.host), json.dumps(asdict(login)), mode=0o600)


def read_logins() -> list[Login]:
    """Return the logins that were recorded and not forgotten; the connection of each may be gone."""
    found = []
    for path in sorted(socket_folder().glob("*.json")):
        try:
            found.append(Login(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            path.unlink(missing_ok=True)
    return found


def forget_login(host: str) -> None:
    _record(host).unlink(missing_ok=True)


def _record(host: str) -> Path:
    return socket_folder() / f"{_key(host)}.json"


def _key(host: str) -> str:
    return hashlib.sha256(host.encode()).hexdigest()[:12]
