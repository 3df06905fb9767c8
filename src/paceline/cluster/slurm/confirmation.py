"""What a submission from another machine has led to, in a file of its own. Its answer may be lost with the connection.

The same submission, sent again, finds its job by this file instead of submitting a second one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.slurm.commands import read_job_id
from paceline.cluster.slurm.sbatch import find_job
from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError

PATIENCE = 90.0  # seconds to wait for an earlier command that has not heard yet that its connection is lost
_descriptor: list[int] = []  # of the file of the submission that this process carries out


def begin_submission(path: Path) -> tuple[RunFolder, str] | None:
    """Return the run and the job of this submission if it was carried out already.

    Otherwise, what this process submits is recorded there, and nobody else carries out the same submission meanwhile.
    Raises ClusterError if it was withdrawn, and if Slurm does not say whether there is a job.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor)
        values = _read(descriptor)
        found = _find(values)
    except BaseException:
        os.close(descriptor)
        raise
    if found is None and not values.get("withdrawn"):
        _descriptor[:] = [descriptor]
        return None
    os.close(descriptor)
    if found is None:
        raise ClusterError("This submission was withdrawn before it began.", hint="Submit the script again.")
    return found


def settle_submission(path: Path) -> tuple[RunFolder, str] | None:
    """Return the run and the job of a submission. If it has led to none, it is withdrawn: it never leads to one.

    Raises ClusterError if Slurm does not say whether there is a job: nothing is withdrawn then.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor)
        values = _read(descriptor)
        found = _find(values)
        if found is None and not values.get("withdrawn"):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({**values, "withdrawn": True}).encode(), 0)
            os.fsync(descriptor)
        return found
    finally:
        os.close(descriptor)


def note_attempt(folder: RunFolder, *, known: Sequence[str]) -> None:
    """Record that sbatch is about to be called for a run; `known` are its earlier jobs."""
    _write({"folder": str(folder.path), "known": list(known)})


def note_job(folder: RunFolder, job: str) -> None:
    _write({"folder": str(folder.path), "job": job})
    if _descriptor:
        os.close(_descriptor.pop())


def _find(values: dict[str, Any]) -> tuple[RunFolder, str] | None:
    try:
        folder, known = RunFolder(Path(values["folder"])), values.get("known", ())
    except KeyError:
        return None
    job = values.get("job") or read_job_id(folder)
    if job in known:
        job = None
    if job is None and folder.path.exists() and not folder.cancelled.exists():
        # The command was killed while it called sbatch, or before it had recorded the job.
        job = find_job(folder.path, os.environ, known=known, pauses=(0.0, 1.0))
    return None if job is None else (folder, job)


def _lock(descriptor: int) -> None:
    import fcntl

    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ClusterError(
                    "The same command, whose connection was lost, is still at work here.",
                    hint="Repeat yours in a minute: it then reports the job.",
                ) from None
            time.sleep(0.2)
        except OSError:  # this file system has no locks
            return
        else:
            return


def _read(descriptor: int) -> dict[str, Any]:
    try:
        values = json.loads(os.pread(descriptor, 1 << 20, 0))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _write(values: dict[str, Any]) -> None:
    """Write in place: the lock is the file's. A file that is cut off counts as empty."""
    if _descriptor:
        os.ftruncate(_descriptor[0], 0)
        os.pwrite(_descriptor[0], json.dumps(values).encode(), 0)
        os.fsync(_descriptor[0])
