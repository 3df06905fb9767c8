"""What happens behind the training's back: one thread per save writes this rank's files and reports them.

Rank 0's thread waits for the reports of all ranks, writes the marker and renames the folder into place. Files
carry the news, not collectives: a rank that dies in the middle leaves a partial folder, and nobody hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import marker
from paceline.contract.checkpoint.marker import Marker, Whole
from paceline.contract.checkpoint.names import CHECKPOINT_MARKER, checkpoint_name
from paceline.contract.checkpoint.safetensors import BLOCK
from paceline.contract.run_folder import write_atomically
from paceline.errors import CheckpointError
from paceline.runtime.checkpoint import retention, sharded
from paceline.runtime.checkpoint.image import Image

GIVEN_UP = "rank 0 gave the save up"
WRITE = 16 << 20  # bytes per write: long enough for any file system, short enough to notice a full one


@dataclass
class Job:
    """One save of one rank, and how it ended."""

    folder: Path  # of all checkpoints
    step: int
    epoch: int
    meta: Any
    attempt: int
    number: int  # of this attempt's saves, from 1
    rank: int
    world_size: int
    image: Image
    objects: dict[str, Any] | None  # rank 0: the replicated trees
    kinds: dict[str, str]
    state: Any  # this rank's own tree
    ready: Any = None  # CUDA event after which the image is whole
    device: Any = None
    sharded: dict[str, Any] = field(default_factory=dict)
    group: Any = None
    patience: float = 600.0
    after: Callable[[], None] | None = None  # rank 0: retention
    error: str | None = None
    seconds: float = 0.0

    @property
    def save(self) -> str:
        return f"{self.attempt}-{self.number}"

    @property
    def final(self) -> Path:
        return self.folder / checkpoint_name(self.step)

    @property
    def partial(self) -> Path:
        return self.folder / f"{self.final.name}{retention.PARTIAL}{self.save}"

    @property
    def tombstone(self) -> Path:
        return self.partial.with_name(self.partial.name + retention.FAILED)


def work(job: Job) -> None:
    """The thread's whole life. It never raises: `job.error` says what went wrong."""
    began = time.perf_counter()
    try:
        _await_copies(job)
        files = _write_files(job)
        _report(job, {"digest": job.image.share.digest, "files": {n: asdict(w) for n, w in files.items()}})
        if job.rank == 0:
            _commit(job, _reports(job))
        elif job.tombstone.exists():
            raise CheckpointError(GIVEN_UP)
    except Exception as error:
        job.error = _in_words(error)
        _give_up(job)
    job.seconds = time.perf_counter() - began
    if job.rank == 0 and job.error is None and job.after is not None:
        job.after()


def _await_copies(job: Job) -> None:
    if job.ready is not None:
        import torch

        torch.cuda.set_device(job.device)  # else this thread would open a context on the first GPU
        job.ready.synchronize()


def _write_files(job: Job) -> dict[str, Whole]:
    if job.rank == 0:
        retention.sweep(job.folder, attempt=job.attempt, before=job.number)
    files: dict[str, Whole] = {}
    if job.sharded:
        # First, and whatever else fails: all writers meet in it, and it tells them all of a failure.
        files |= sharded.write(job.partial, job.sharded, group=job.group, rank=job.rank)
    job.partial.mkdir(parents=True, exist_ok=True)
    suffix = f"{job.rank + 1:05d}-of-{job.world_size:05d}"
    if job.image.share.pieces or job.rank == 0:
        name = f"share-{suffix}.safetensors"
        files[name] = write_image(job.partial / name, job.image.memory(), size=job.image.file_size)
    files[f"state-{suffix}.json"] = _write_json(job.partial / f"state-{suffix}.json", job.state)
    if job.objects is not None:
        files["objects.json"] = _write_json(job.partial / "objects.json", job.objects)
    return files


def write_image(path: Path, memory: memoryview, *, size: int) -> Whole:
    """Write whole blocks past the page cache where the file system can: it costs the training no processor time."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags | direct, 0o644)
    except OSError:
        descriptor = os.open(path, flags, 0o644)
        direct = 0
    crc = 0
    try:
        for begin in range(0, len(memory), WRITE):
            chunk = memory[begin : begin + WRITE]
            crc = zlib.crc32(chunk[: max(0, size - begin)], crc)
            while chunk:
                try:
                    count = os.write(descriptor, chunk)
                except OSError:
                    if not direct:
                        raise
                    count = 0
                chunk = chunk[count:]
                if direct and (count == 0 or len(chunk) % BLOCK != 0):
                    _write_through_the_cache(descriptor, direct)
                    direct = 0
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Whole(size, crc)


def _write_through_the_cache(descriptor: int, direct: int) -> None:
    """From here on this file is written as usual: its file system does not take this block directly."""
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)


def _write_json(path: Path, tree: Any) -> Whole:
    raw = json.dumps(tree, separators=(",", ":")).encode()
    _write_synced(path, raw)
    return Whole(len(raw), zlib.crc32(raw))


def _write_synced(path: Path, raw: bytes) -> None:
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


# -- reports: how rank 0 learns that everybody's files are whole ---------------------------------------


def _report_path(job: Job, rank: int) -> Path:
    return job.partial / f"report-{rank}.json"


def _report(job: Job, table: dict[str, Any]) -> None:
    write_atomically(_report_path(job, job.rank), json.dumps(table))


def _reports(job: Job) -> dict[int, dict[str, Any]]:
    """Everybody's report, as they arrive, or an error that names a rank."""
    heard: dict[int, dict[str, Any]] = {}
    deadline, pause = time.monotonic() + job.patience, 0.002
    while True:
        names = set(os.listdir(job.partial))  # listing asks NFS anew; a stat may answer from its cache
        for rank in range(job.world_size):
            path = _report_path(job, rank)
            if rank not in heard and path.name in names:
                heard[rank] = json.loads(path.read_text(encoding="utf-8"))
                if "error" in heard[rank]:
                    raise CheckpointError(f"rank {rank}: {heard[rank]['error']}")
                if heard[rank]["digest"] != job.image.share.digest:
                    raise CheckpointError(
                        f"rank {rank} holds other tensors than rank 0 (names, shapes or dtypes differ)",
                        hint="register the same objects on every rank, in the same state",
                    )
        if len(heard) == job.world_size:
            return heard
        if time.monotonic() > deadline:
            silent = sorted(set(range(job.world_size)) - set(heard))
            raise CheckpointError(f"ranks {silent} did not finish writing within {job.patience:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _commit(job: Job, reports: dict[int, dict[str, Any]]) -> None:
    files = {name: Whole(**entry) for each in reports.values() for name, entry in each["files"].items()}
    for name, whole in files.items():
        size = os.stat(job.partial / name).st_size
        if size != whole.size:
            raise CheckpointError(f"{name} has {size} bytes instead of {whole.size}")
    for rank in range(job.world_size):
        _report_path(job, rank).unlink()
    made = Marker(
        step=job.step, epoch=job.epoch, world_size=job.world_size, save=job.save, time=time.time(), meta=job.meta,
        objects=job.kinds, files=files,
    )  # fmt: skip
    _write_synced(job.partial / CHECKPOINT_MARKER, made.to_json().encode())
    for folder in {(job.partial / name).parent for name in files}:
        _sync_folder(folder)
    if job.final.exists():  # a damaged one, from which nobody could resume: this step was reached again
        retention.discard(job.final, attempt=job.attempt)
    os.rename(job.partial, job.final)
    _sync_folder(job.folder)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # Windows opens no folders
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse it for folders, and need none
    finally:
        os.close(descriptor)


def _give_up(job: Job) -> None:
    """Leave nothing behind that takes space, and tell the others as far as the file system lets us."""
    try:
        if job.rank == 0:
            job.tombstone.touch()
            shutil.rmtree(job.partial, ignore_errors=True)
            return
        for path in job.partial.glob(f"*-{job.rank + 1:05d}-of-*"):
            path.unlink(missing_ok=True)
        _report(job, {"error": job.error})
    except OSError:
        pass
    # Rank 0 leaves the tombstone before it removes the folder: either it has removed this too, or we see it here.
    if job.tombstone.exists():
        shutil.rmtree(job.partial, ignore_errors=True)


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__


def await_commit(job: Job) -> None:
    """Another rank than 0: until the checkpoint stands, or it is certain that it will not."""
    deadline, pause, gone_since = time.monotonic() + job.patience, 0.002, None
    while job.error is None:
        try:
            names = os.listdir(job.folder)
        except OSError as error:
            job.error = _in_words(error)
            return
        if job.final.name in names and _is_this(job):
            return
        if job.tombstone.name in names:
            job.error = GIVEN_UP
        elif job.partial.name in names:
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()
        elif time.monotonic() - gone_since > 2:  # neither there nor renamed: a listing may miss a rename once
            job.error = GIVEN_UP
        if time.monotonic() > deadline:
            job.error = f"rank 0 did not commit within {job.patience:.0f} s"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _is_this(job: Job) -> bool:
    try:
        return marker.read(job.final).save == job.save
    except CheckpointError:
        return False
