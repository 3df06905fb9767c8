"""Files that a user names for output: replaced as a whole if they are files, written into if they
are anything else.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
