"""What a submission from another machine has led to, in a file of its own. Its answer may be lost
with the connection.

The same submission, sent again, finds its job by this file instead of submitting a second one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.contract.run_folder import RunFolder
from paceline.errors import ClusterError
from paceline.launch.confirmation.sweep_outcome import SweepOutcome, find_sweep
from paceline.slurm.commands import read_job_id
from paceline.slurm.sbatch import find_job

# seconds to wait for an earlier command that has not heard yet that its connection is lost
PATIENCE = 90.0
_descriptor: list[int] = []  # of the file of the submission that this process carries out
_begun: list[Path] = []  # the same file, whether it is still open or not
_code: list[str] = []  # the digest of what was sent with it
# trials by sweep: an earlier command was killed before it had submitted any
_abandoned: dict[Path, list[int]] = {}


class RunOutcome(NamedTuple):
    """The run and the job that a submission has led to."""

    folder: RunFolder
    job: str


def begin_submission(path: Path, *, code: str = "") -> RunOutcome | SweepOutcome | None:
    """Return what this submission has led to if it was carried out already.

    Otherwise, what this process submits is recorded there, with the digest of its code, and nobody
    else carries out the same submission meanwhile.
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
        _descriptor[:], _begun[:], _code[:] = [descriptor], [path], [code]
        if "submission" in values:
            _abandoned[Path(values["submission"]).parent.parent] = list(values.get("trials", ()))
        return None
    os.close(descriptor)
    if found is None:
        raise ClusterError(
            "This submission was withdrawn before it began.", hint="Submit the script again."
        )
    return found


def settle_submission(path: Path) -> RunOutcome | SweepOutcome | None:
    """Return what a submission has led to. If it is nothing, it is withdrawn: it never leads to a
    job.

    Raises ClusterError if Slurm does not say whether there is a job: nothing is withdrawn then.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor)
        values = _read(descriptor)
        found = _find(values)
        if found is None and not values.get("withdrawn"):
            _append(descriptor, {**values, "withdrawn": True})
        return found
    finally:
        os.close(descriptor)


def read_run(content: bytes) -> Path | None:
    """Return the folder of the run in the file of a submission; None if there is none."""
    folder = _parse(content).get("folder")
    return Path(folder) if isinstance(folder, str) else None


def read_code(content: bytes) -> str:
    """Return the digest of the code that the file of a submission names; empty if it names none."""
    return str(_parse(content).get("code") or "")


def is_carried_out_here() -> bool:
    """Whether this process carries out a submission from another machine, which waits for its
    answer.
    """
    return bool(_begun)


def note_attempt(folder: RunFolder, *, known: Sequence[str]) -> None:
    """Record that sbatch is about to be called for a run; `known` are its earlier jobs."""
    _write({"folder": str(folder.path), "known": list(known)})


def note_job(folder: RunFolder, job: str) -> str:
    """Record the job of a run. It is in the queue already, so that a full disk is no error: return
    a note for it.

    What `note_attempt` has recorded is enough to find the job later, as long as Slurm knows it.
    """
    try:
        _write({"folder": str(folder.path), "job": job})
    except OSError as problem:
        reason = problem.strerror or str(problem)
        note = (
            f"job {job} is submitted, but Paceline cannot note this in {_begun[0].parent}: {reason}"
        )
    else:
        note = ""
    if _descriptor:  # not after Ctrl-C: the job is not known then
        os.close(_descriptor.pop())
    return note


def is_unanswered() -> bool:
    """Return whether this process submits a run and does not know its job yet."""
    return bool(_descriptor)


def note_trials(submission: Path, trials: Sequence[int]) -> None:
    """Record that a sweep is about to submit trials; `submission` is the folder that they share."""
    _write({"submission": str(submission), "trials": list(trials)})


def abandoned_trials(sweep: Path) -> list[int]:
    """Return the trials that this very submission was to submit when it was killed. They have no
    job.
    """
    return _abandoned.get(sweep, [])


def _find(values: dict[str, Any]) -> RunOutcome | SweepOutcome | None:
    if "submission" in values:
        return find_sweep(Path(values["submission"]), values.get("trials", ()))
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
    return None if job is None else RunOutcome(folder, job)


def _lock(descriptor: int) -> None:
    import fcntl

    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ClusterError(
                    "The same command is still running here after its connection was lost.",
                    hint="Repeat the command in a minute; it will then report the job.",
                ) from None
            time.sleep(0.2)
        except OSError:  # this file system has no locks
            return
        else:
            return


def _read(descriptor: int) -> dict[str, Any]:
    return _parse(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


def _parse(content: bytes) -> dict[str, Any]:
    """Return the last line that is complete."""
    for line in reversed(content.splitlines()):
        with suppress(ValueError):
            if isinstance(values := json.loads(line), dict):
                return values
    return {}


def _write(values: dict[str, Any]) -> None:
    if _descriptor:
        _append(_descriptor[0], {"code": _code[0], **values})


def _append(descriptor: int, values: dict[str, Any]) -> None:
    """Add a line: the lock is the file's. If the command is killed, or the disk is full, the lines
    before it count.
    """
    os.lseek(descriptor, 0, os.SEEK_END)
    content = f"\n{json.dumps(values)}\n".encode()
    while content:
        content = content[os.write(descriptor, content) :]
    os.fsync(descriptor)
