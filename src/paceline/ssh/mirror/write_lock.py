"""The lock of a mirror: one process writes at a time, for a moment.

A process that is stopped in that moment, as by Ctrl-Z, keeps it. Nobody else may write then, because the process
will continue its write when it resumes. Readers need no lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.contract.files.shared_folders import open_own_file
from paceline.errors import ConnectionProblem

PATIENCE = 5.0  # seconds in which whoever has the lock is expected to give it up
PAUSES = (0.001, 0.05)  # seconds between tries: at first, and at most
MARK_SIZE = 48  # bytes of the file that tell who has the lock


class MirrorBusy(ConnectionProblem):
    """Another process has the lock and does not go on: nothing that comes can be written."""


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Be the only process that writes. Raises MirrorBusy if another one does not get on with it."""
    descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT)
    try:
        _take(descriptor, path)
        mark = f"{os.getpid()} {time.monotonic_ns()}"  # another one each time
        os.pwrite(descriptor, mark.ljust(MARK_SIZE).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    seen, since, pause = b"", 0.0, PAUSES[0]
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(descriptor, MARK_SIZE, 0)
        if holder != seen or not since:  # somebody writes: it is only busy
            seen, since = holder, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            raise _busy(holder, path)
        time.sleep(pause)
        pause = min(2 * pause, PAUSES[1])


def _busy(holder: bytes, path: Path) -> MirrorBusy:
    number = holder.split()[0].decode(errors="replace") if holder.split() else ""
    if not number.isdigit():
        return MirrorBusy(
            f"Another process has not finished writing to {path.parent}.",
            hint="Continue that process, or kill it.",
        )
    return MirrorBusy(
        f"Process {number} {_state(int(number))} while it writes to {path.parent}, so no updates arrive.",
        hint=f"Continue it with `fg` in its terminal, or with `kill -CONT {number}`; or end it: kill -KILL {number}",
    )


def _state(pid: int) -> str:
    import psutil

    try:
        return "is stopped" if psutil.Process(pid).status() == psutil.STATUS_STOPPED else "hangs"
    except psutil.Error:
        return "hangs"
