"""Write a checkpoint in the background: one thread per save and rank writes the rank's files and
reports them.

Rank 0's thread waits for the reports of all ranks, writes the marker and renames the folder into
place. Ranks communicate through files, not collectives: if one dies during a save, it leaves a
partial folder and nobody hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.contract.checkpoint import (
    CHECKPOINT_MARKER,
    OBJECTS_FILE,
    PARTIAL,
    FileChecksum,
    Marker,
    checkpoint_name,
    rank_suffix,
    share_file,
    state_file,
)
from paceline.contract.run_folder import write_atomically
from paceline.errors import CheckpointError, TakenOver
from paceline.runtime.checkpoint import retention
from paceline.runtime.checkpoint.save_buffer import Image

# per write: large enough for any file system, small enough to notice a full one early
WRITE_BYTES = 16 << 20


@dataclass
class SaveTask:
    """One save of one rank, and its outcome."""

    folder: Path  # of all checkpoints
    marker: Marker  # all but the time and the files
    attempt: int
    number: int  # counts this attempt's saves, from 1
    rank: int
    image: Image
    objects: dict[str, Any] | None  # on rank 0: the trees of the replicated objects
    state: Any  # this rank's own tree
    ready: Any = None  # CUDA event after which the image is filled
    device: Any = None
    timeout: float = 600.0
    # on rank 0: raises an error if it may not be committed
    before_commit: Callable[[], None] | None = None
    on_commit: Callable[[], None] | None = None  # on rank 0: retention
    error: str | None = None
    taken_over: TakenOver | None = None  # on rank 0: why nothing may be saved any more
    seconds: float = 0.0

    @property
    def final(self) -> Path:
        return self.folder / checkpoint_name(self.marker.step)

    @property
    def partial(self) -> Path:
        return self.folder / f"{self.final.name}{PARTIAL}{self.marker.save}"


def run(task: SaveTask) -> None:
    """Do one save: the body of the thread. Never raises; sets `task.error` instead."""
    start = time.perf_counter()
    try:
        _wait_for_copies(task)
        files = _write_files(task)
        known = {name: asdict(checksum) for name, checksum in files.items()}
        digest = task.image.digest
        _write_report(task, {"digest": digest, "files": known})
        if task.rank == 0:
            _commit(task, _collect_reports(task))
    except Exception as error:
        task.error = _describe(error)
        task.taken_over = error if isinstance(error, TakenOver) else None
        _abandon(task)
    task.seconds = time.perf_counter() - start
    if task.rank == 0 and task.error is None and task.on_commit is not None:
        task.on_commit()


def _wait_for_copies(task: SaveTask) -> None:
    if task.ready is not None:
        torch.cuda.set_device(task.device)  # otherwise this thread opens a context on the first GPU
        task.ready.synchronize()


def _write_files(task: SaveTask) -> dict[str, FileChecksum]:
    if task.rank == 0:
        retention.clean_up(task.folder, attempt=task.attempt, before=task.number)
    files: dict[str, FileChecksum] = {}
    task.partial.mkdir(parents=True, exist_ok=True)
    if task.image.pieces or task.rank == 0:
        name = share_file(task.rank, task.marker.world_size)
        files[name] = write_image(
            task.partial / name, memoryview(task.image.memory), size=task.image.file_size
        )
    name = state_file(task.rank, task.marker.world_size)
    files[name] = _write_json(task.partial / name, task.state)
    if task.objects is not None:
        files[OBJECTS_FILE] = _write_json(task.partial / OBJECTS_FILE, task.objects)
    return files


def write_image(path: Path, memory: memoryview, *, size: int) -> FileChecksum:
    """Write whole blocks past the page cache if the file system can: that costs the training no
    CPU time.
    """
    try:
        return _write_blocks(path, memory, size=size, flags=getattr(os, "O_DIRECT", 0))
    except OSError:  # it can't, or rejects a block; any other fault comes again
        return _write_blocks(path, memory, size=size, flags=0)


def _write_blocks(path: Path, memory: memoryview, *, size: int, flags: int) -> FileChecksum:
    crc = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
    try:
        for begin in range(0, len(memory), WRITE_BYTES):
            chunk = memory[begin : begin + WRITE_BYTES]
            crc = zlib.crc32(chunk[: max(0, size - begin)], crc)
            while chunk:
                chunk = chunk[os.write(descriptor, chunk) :]
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileChecksum(size, crc)


def _write_json(path: Path, tree: Any) -> FileChecksum:
    text = json.dumps(tree, separators=(",", ":"))  # in ASCII
    write_atomically(path, text, sync=True)
    return FileChecksum(len(text), zlib.crc32(text.encode()))


# -- reports: how rank 0 learns that the files of all ranks are complete


def _report_path(task: SaveTask, rank: int) -> Path:
    return task.partial / f"report-{rank}.json"


def _write_report(task: SaveTask, report: dict[str, Any]) -> None:
    write_atomically(_report_path(task, task.rank), json.dumps(report))


def _collect_reports(task: SaveTask) -> dict[int, dict[str, Any]]:
    """Wait for the reports of all ranks, or raise an error that names a rank."""
    reports: dict[int, dict[str, Any]] = {}
    deadline, pause = time.monotonic() + task.timeout, 0.002
    while True:
        # asks NFS again, where a stat may answer from its cache
        present = set(os.listdir(task.partial))
        for rank in range(task.marker.world_size):
            path = _report_path(task, rank)
            if rank not in reports and path.name in present:
                reports[rank] = json.loads(path.read_text(encoding="utf-8"))
                if "error" in reports[rank]:
                    raise CheckpointError(f"rank {rank}: {reports[rank]['error']}")
                if reports[rank]["digest"] != task.image.digest:
                    raise CheckpointError(
                        f"rank {rank} has different tensors than rank 0 (names, shapes or dtypes): "
                        "register the same objects on every rank, in the same state"
                    )
        if len(reports) == task.marker.world_size:
            return reports
        if time.monotonic() > deadline:
            missing = sorted(set(range(task.marker.world_size)) - set(reports))
            raise CheckpointError(
                f"ranks {missing} did not finish writing within {task.timeout:.0f} s"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _commit(task: SaveTask, reports: dict[int, dict[str, Any]]) -> None:
    files = {
        name: FileChecksum(**entry)
        for report in reports.values()
        for name, entry in report["files"].items()
    }
    for name, expected in files.items():
        size = os.stat(task.partial / name).st_size
        if size != expected.size:
            raise CheckpointError(f"{name} has {size} bytes instead of {expected.size}")
    for rank in range(task.marker.world_size):
        _report_path(task, rank).unlink()
    marker = replace(task.marker, time=time.time(), files=files)
    write_atomically(task.partial / CHECKPOINT_MARKER, marker.to_json(), sync=True)
    _sync_folder(task.partial)
    if task.before_commit is not None:
        task.before_commit()
    # A damaged checkpoint of a step that has been reached again, or one that this replaces. If the
    # process ends between the two renames, the next attempt completes the second.
    old = retention.set_aside(task.final, attempt=task.attempt) if task.final.exists() else None
    os.rename(task.partial, task.final)
    _sync_folder(task.folder)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    # Windows can't open folders, and some network file systems reject this and don't need it.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _abandon(task: SaveTask) -> None:
    """Remove what takes space, and tell rank 0 if the file system still allows it."""
    if task.rank == 0:
        shutil.rmtree(task.partial, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for path in task.partial.glob(f"*-{rank_suffix(task.rank, task.marker.world_size)}*"):
            path.unlink(missing_ok=True)
        _write_report(task, {"error": task.error})


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
