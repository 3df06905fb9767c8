"""Files that we open or write with care: in places that all users share, and where a user names one
for output.

Anybody may have put anything under any name in a place such as /tmp and /dev/shm: a link to another
file, a pipe that blocks whoever opens it, a folder that they can read. Everything of ours there
lies in a folder of our own (mode 0700), and every file is opened without following a link or
waiting, and used only if it is a regular file of ours.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PRIVATE_MODE = 0o700


def own_folder_name() -> str:
    """Return the name of this user's folder in a shared place."""
    return f"paceline-{os.geteuid()}"


def make_own_folder(base: Path | str) -> Path:
    """Return our folder in a shared place, and make it if there is none.

    If another user has taken its name, it gets another one, which `find_own_folder` finds too.
    """
    if (found := find_own_folder(base)) is not None:
        return found
    path = Path(base) / own_folder_name()
    try:
        path.mkdir(PRIVATE_MODE)
    except FileExistsError:
        path = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=base))
    # two processes may have made one each: both use the same
    return find_own_folder(base) or path


def find_own_folder(base: Path | str) -> Path | None:
    """Return our folder in a shared place, closed to others from now on; None if there is none."""
    name = own_folder_name()
    for path in itertools.chain([Path(base) / name], Path(base).glob(f"{name}-*")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                if stat.S_IMODE(status.st_mode) != PRIVATE_MODE:
                    path.chmod(PRIVATE_MODE)
                return path
    return None


def open_own_file(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of ours, without following a link or waiting for anybody.

    `flags` may create it: it is then ours alone (mode 0600). Raises OSError if the file is anything
    else.
    """
    descriptor = open_without_waiting(path, flags)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "It belongs to another user", str(path))
    return descriptor


def open_without_waiting(
    path: Path | str, flags: int = os.O_RDONLY, *, follow: bool = False
) -> int:
    """Open a regular file of any user's, without waiting. Raises OSError for everything else.

    `follow` allows a link to such a file.
    """
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is not a regular file", str(path))
    return descriptor


@contextlib.contextmanager
def replace_file(path: Path, *, mode: int = 0o644, sync: bool = False) -> Iterator[BinaryIO]:
    """Write a file that appears under its name when it is complete; with `sync`, it is on the disk
    before that.
    """
    # A name that nobody can guess, and no file but a new one: others may write to the folder too.
    partial = path.with_name(f".{path.name[:50]}.{os.urandom(8).hex()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[BinaryIO]:
    """Open a user's path for writing.

    A regular file is replaced as a whole and keeps its permissions, and a link to it stays a link.
    Standard output, a pipe, a terminal or another device gets what is written.
    """
    target = Path(os.path.realpath(path))
    if is_standard_output(path):
        sys.stdout.flush()
        with open(os.dup(1), "wb") as file:
            yield file
    elif target.exists() and not target.is_file():
        with open(os.open(target, os.O_WRONLY), "wb") as file:  # never made anew
            yield file
    else:
        with replace_file(target) as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file


def write_output(path: Path, text: str) -> None:
    """Write text to a user's path as `open_output` does."""
    with open_output(path) as file:
        file.write(text.encode("utf-8"))


def is_standard_output(path: Path) -> bool:
    """Whether a path is where this process prints, such as /dev/stdout."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(1))


def show_size(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
