"""Submissions whose answer has not arrived: the same command, typed again, asks for its job before it submits one.

Each has a file on this machine, with an id that goes along, from before it is sent until its answer is here.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.ssh.paceline_bundle import cache_folder

EXPIRY = 6 * 86_400.0  # seconds; the other side remembers longer


class Submission:
    """One `submit` to a cluster. `is_repeat` means that the answer to the same command was lost earlier."""

    def __init__(self, path: Path, descriptor: int, *, is_repeat: bool) -> None:
        self.path, self._descriptor, self.is_repeat = path, descriptor, is_repeat

    @property
    def id(self) -> str:
        return self.path.name.rpartition("-")[2]

    def confirm(self) -> None:
        """Note that the answer has arrived, or that nothing was sent."""
        with _locked_folder():
            self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        os.close(self._descriptor)


def open_submission(cluster: str, host: str, args: Sequence[str]) -> Submission:
    """Return the submission of this command: an earlier one from the same folder, unless that has its answer.

    `cluster` is the name that `--on` has: another profile of the same host is another job.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = hashlib.sha256(json.dumps([cluster, host, os.getcwd(), *args]).encode()).hexdigest()[:16]
    with _locked_folder():
        for path in sorted(folder.iterdir()):
            if _is_expired(path):
                path.unlink(missing_ok=True)
            elif path.name.startswith(f"{key}-") and (descriptor := _lock(path)) is not None:
                return Submission(path, descriptor, is_repeat=True)
        path = folder / f"{key}-{secrets.token_hex(12)}"
        made = _lock(path, os.O_CREAT | os.O_EXCL)
    assert made is not None, "nobody else has seen this name while the folder was locked"
    return Submission(path, made, is_repeat=False)


def _folder() -> Path:
    return cache_folder() / "submissions"


@contextmanager
def _locked_folder() -> Iterator[None]:
    """Keep other commands from opening or removing files of submissions. A command that is killed leaves no lock."""
    import fcntl

    with open(_folder().with_suffix(".lock"), "w", encoding="ascii") as file:
        with suppress(OSError):  # this file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_expired(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > EXPIRY
    # an older version of Paceline, which does not lock the folder, has just removed it
    except OSError:
        return False


def _lock(path: Path, flags: int = 0) -> int | None:
    """Open a file for this process alone. None if it is gone, or if another command is still waiting for its answer."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # this file system has no locks
        pass
    if os.fstat(descriptor).st_nlink == 0:  # its answer has arrived meanwhile
        os.close(descriptor)
        return None
    return descriptor
