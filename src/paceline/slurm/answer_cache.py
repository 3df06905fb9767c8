"""The file in which all Paceline processes of a user on a machine share what Slurm has answered.

It lies in a folder that only this user can enter, in memory where the machine has a place for that.
Each Slurm (installation, configuration and cluster) has its own file. It is renamed into place
whole, so that readers need no lock; whoever wants to ask Slurm takes the lock first, so that others
wait for the same answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.files import find_own_folder, make_own_folder, open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.slurm.job_states import JobState

MEMORY = "/dev/shm"
PREFIX = "slurm-"
MAX_AGE = 86400.0  # seconds for which the name of the cluster is not asked again
MAX_BYTES = 100_000_000


@dataclass(frozen=True)
class Answer:
    """What Slurm has answered last. Times are in seconds since 1970, by this machine's clock."""

    asked: float = 0.0  # when squeue was called, or when it failed; 0 if it never was called
    # the user's jobs that the controller remembers
    jobs: dict[str, JobState] = field(default_factory=dict)
    # jobs that had left the queue
    accounting: dict[str, tuple[float, JobState | None]] = field(default_factory=dict)
    strikes: int = 0  # questions in a row that failed or took long
    problem: str = ""  # why there is no answer
    hint: str = ""
    took: float = 0.0  # seconds until it failed

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        table: dict[str, Any] = json.loads(text)
        jobs = {job: JobState(**state) for job, state in table["jobs"].items()}
        accounting = {
            job: (asked, JobState(**state) if state else None)
            for job, (asked, state) in table["accounting"].items()
        }
        return cls(**{**table, "jobs": jobs, "accounting": accounting})


@dataclass(frozen=True)
class AnswerCache:
    """The shared answer of one Slurm."""

    path: Path

    @classmethod
    def here(cls) -> AnswerCache | None:
        """Return the file of the Slurm that this process uses; None without Slurm, or without a
        place for the file.
        """
        name = _name()
        if name is None:
            return None
        try:
            return cls(make_own_folder(_base()) / name)
        except OSError:
            return None

    def read(self) -> Answer:
        """Return the last answer; an empty one if there is none."""
        try:
            with os.fdopen(open_own_file(self.path), "rb") as file:
                return Answer.from_json(file.read(MAX_BYTES).decode())
        # none yet, or that of another version
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return Answer()

    def write(self, answer: Answer) -> None:
        """Put a new answer in place. A full disk is no reason to fail."""
        with suppress(OSError):
            write_atomically(self.path, answer.to_json(), mode=0o600)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that asks Slurm; a question takes a minute at most."""
        try:
            descriptor = open_own_file(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        except OSError:  # the disk is full: ask without a lock
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def changed(self) -> float:
        """Return when a command last changed the queue; 0 if none has, or if the clock was set
        back since.
        """
        try:
            changed = self.path.with_suffix(".changed").lstat().st_mtime
        except OSError:
            return 0.0
        return changed if changed <= time.time() + 1 else 0.0

    def mark_changed(self) -> None:
        path = self.path.with_suffix(".changed")
        with suppress(OSError):
            os.close(open_own_file(path, os.O_WRONLY | os.O_CREAT))
            now = time.time()  # the file system's own clock may be some milliseconds behind
            os.utime(path, (now, now))


def forget_answer() -> None:
    """Make the next look ask Slurm: a command has just changed the queue."""
    name, folder = _name(), find_own_folder(_base())
    if name is not None and folder is not None:
        AnswerCache(folder / name).mark_changed()


def remember_name(ask: Callable[[], str]) -> str:
    """Return the name of the cluster, asking for it once a day: it does not change. An empty name
    is not kept.
    """
    cache = AnswerCache.here()
    if cache is None:
        return ask()
    path = cache.path.with_suffix(".name")
    with suppress(OSError, ValueError):
        if 0 <= time.time() - path.lstat().st_mtime < MAX_AGE:
            with os.fdopen(open_own_file(path), encoding="utf-8") as file:
                return file.read(200)
    found = ask()
    with suppress(OSError):
        if found:
            write_atomically(path, found, mode=0o600)
    return found


def _base() -> str:
    return MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _name() -> str | None:
    """Return the file's name, which differs for each Slurm: a sandbox that is started again
    numbers its jobs anew.
    """
    program = shutil.which("squeue")
    if program is None:
        return None
    conf, version = os.environ.get("SLURM_CONF", ""), ""
    with suppress(OSError):
        status = os.stat(conf)
        version = f"{status.st_ino} {status.st_mtime_ns}"
    parts = (program, conf, version, os.environ.get("SLURM_CLUSTERS", ""))
    return f"{PREFIX}{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"
