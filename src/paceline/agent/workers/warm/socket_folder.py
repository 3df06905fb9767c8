"""Where warm processes listen: one socket per interpreter, in a folder that only its user can
enter.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import zlib

from paceline.contract.files import find_own_folder, make_own_folder

MEMORY = "/dev/shm"
PREFIX = "warm-"
NAME = "paceline-warm"  # of a warm process
_BACKLOG = 16


def _base() -> str:
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    return folder if os.path.isabs(folder) and os.access(folder, os.W_OK | os.X_OK) else MEMORY


class SocketFolder:
    """The folder, by its descriptor: nobody can put another in its place, and no path is too long
    for a socket.
    """

    def __init__(self, folder: int) -> None:
        self.folder = folder

    @classmethod
    def make(cls) -> SocketFolder:
        return cls(_open(str(make_own_folder(_base()))))

    @classmethod
    def find(cls) -> SocketFolder | None:
        path = find_own_folder(_base())
        return None if path is None else cls(_open(str(path)))

    def names(self) -> list[str]:
        """Return the names of all sockets; some may be left over."""
        return sorted(
            name for name in os.listdir(self.folder) if name.startswith(PREFIX) and "." not in name
        )

    def connect(self, name: str, timeout: float) -> socket.socket | None:
        """Connect to the warm process of this name, if there is one and it is this user's."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(self._path(name))
            if is_same_user(connection):
                return connection
        except OSError:  # there is none, or it was killed
            pass
        connection.close()
        return None

    def listen(self, name: str) -> tuple[socket.socket, int] | None:
        """Return a listening socket and the lock of its name; None if another process has it."""
        lock = os.open(
            f"{name}.lock",
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=self.folder,
        )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(f"{name}.lock", dir_fd=self.folder).st_ino != os.fstat(lock).st_ino:
                raise OSError("the process that had it has just removed it")
            self._remove(name)  # of a process that was killed
            listener.bind(self._path(name))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            os.close(lock)
            return None
        listener.setblocking(False)
        return listener, lock

    def leave(self, name: str) -> None:
        """Remove the socket and its lock. Only for the process that holds the lock."""
        self._remove(name)
        self._remove(f"{name}.lock")

    def close(self) -> None:
        os.close(self.folder)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.folder)
        except OSError:
            pass

    def _path(self, name: str) -> str:
        return f"/proc/self/fd/{self.folder}/{name}"


def _open(path: str) -> int:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(folder).st_uid != os.geteuid():
        os.close(folder)
        raise PermissionError(f"{path} belongs to another user")
    return folder


def socket_name(python: str) -> str:
    return f"{PREFIX}{zlib.crc32(os.fsencode(python)):08x}"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, as the kernel says."""
    return _credentials(connection)[1] == os.geteuid()


def process_of(connection: socket.socket) -> int:
    """Return the process at the other end; of a listening socket, that which began to listen."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end."""
    credentials = struct.Struct("=iII")
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    process, user, group = credentials.unpack(answer)
    return process, user, group
