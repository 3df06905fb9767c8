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
    found = find_own_folder(base)
    if found is not None:
        return found
    try:
        os.mkdir(Path(base) / own_folder_name(), PRIVATE_MODE)
    except FileExistsError:
        made = Path(tempfile.mkdtemp(prefix=f"{own_folder_name()}-", dir=base))
        # two processes may have made one each: both use the first
        return find_own_folder(base) or made
    return Path(base) / own_folder_name()


def find_own_folder(base: Path | str) -> Path | None:
    """Return our folder in a shared place, closed to others from now on; None if there is none."""
    for path in _candidates(Path(base)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it does not exist, is a link, or belongs to others
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid():
                if stat.S_IMODE(status.st_mode) != PRIVATE_MODE:
                    os.fchmod(descriptor, PRIVATE_MODE)
                return path
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return None


def _candidates(base: Path) -> Iterator[Path]:
    name = own_folder_name()
    yield base / name
    try:
        others = sorted(entry for entry in os.listdir(base) if entry.startswith(f"{name}-"))
    except OSError:
        return
    yield from (base / other for other in others)


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
    return open_regular(path, flags, follow=follow)[0]


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, *, follow: bool = False
) -> tuple[int, os.stat_result]:
    """Do the same, and return what the system knows of the file too."""
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        # a link; a pipe without a reader, or a socket
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_a_file(path) from None
        raise
    known = os.fstat(descriptor)
    if not stat.S_ISREG(known.st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    return descriptor, known


def _not_a_file(path: Path | str) -> OSError:
    return OSError(errno.EINVAL, "It is not a regular file", str(path))


STANDARD = (1, 2)  # the descriptors of standard output and standard error


@contextlib.contextmanager
def open_output(path: Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a user's path for writing.

    A regular file appears under its name when it is complete; with `sync`, it is on the disk before
    that. A link stays a link, and an existing file keeps its permissions. A pipe, a terminal or
    another device gets what is written.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    if (descriptor := _standard(found)) is not None:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        with open(os.dup(descriptor), "wb") as file:
            yield file
    elif found is not None and not stat.S_ISREG(found.st_mode):
        with open(os.open(path, os.O_WRONLY), "wb") as file:  # never made anew
            yield file
    else:
        with _replace(Path(os.path.realpath(path)), found, sync=sync) as file:
            yield file


def write_output(path: Path, text: str) -> None:
    """Write text to a user's path as `open_output` does."""
    with open_output(path) as file:
        file.write(text.encode("utf-8"))


def is_standard_output(path: Path) -> bool:
    """Whether a path is where this process prints, such as /dev/stdout."""
    try:
        return _standard(os.stat(path)) == 1
    except OSError:
        return False


def _standard(found: os.stat_result | None) -> int | None:
    """Return the descriptor of this process that has a file open already. It may not be replaced
    under its feet.
    """
    for descriptor in STANDARD:
        with contextlib.suppress(OSError):
            if found is not None and os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


@contextlib.contextmanager
def _replace(path: Path, found: os.stat_result | None, *, sync: bool) -> Iterator[BinaryIO]:
    # A name that nobody can guess, and no file but a new one: others may write to the folder too.
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with open(descriptor, "wb") as file:
            if found is not None:
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def show_size(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
