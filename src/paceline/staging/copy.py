"""Copy the files of an item with several threads: small files in groups, large ones one by one.

A file gets the modification time of its source only when it is complete, so an interrupted copy can
be resumed.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path

from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem
from paceline.staging.manifest import SMALL, FileEntry, Manifest, join

CHUNK = 1 << 20  # bytes that are read at once
THREADS = 8  # most of the time, each waits for a disk or a server
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
LOG_INTERVAL = 10.0  # seconds between lines on progress

Task = Callable[[], object]
# Returns the contents of small files: from their source, or from a pack.
Read = Callable[[Sequence[FileEntry]], list[bytes]]


class Stopped(Exception):
    """The transfer was asked to stop."""


class Transfer:
    """The progress and the stop flag that all copying threads of a node share."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.total = 0
        self.done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size

    def check(self) -> None:
        """Raise `Stopped` after a stop request."""
        if self.stop.is_set():
            raise Stopped

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, or raise the first error."""

        def run(task: Task) -> None:
            self.check()
            task()

        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="staging")
        try:
            for future in as_completed([pool.submit(run, task) for task in tasks]):
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def read_files(folder: str, files: Sequence[FileEntry]) -> list[bytes]:
    """Read small files where they are."""
    contents = []
    for file in files:
        path = join(folder, file.path)
        with open(path, "rb") as source:
            contents.append(source.read(file.size + 1))
        if len(contents[-1]) != file.size:
            raise source_changed(path)
    return contents


def missing_files(manifest: Manifest, target: Path) -> list[FileEntry]:
    """Return the files that are not complete in a target; all of them if there is no target."""
    if not os.path.lexists(target):
        return manifest.files
    return [file for file in manifest.files if not _is_copied(join(target, file.path), file)]


def copy_item(
    manifest: Manifest, target: Path, *, transfer: Transfer, read: Read | None = None
) -> int:
    """Copy what is missing of an item, and return the number of files."""
    files = missing_files(manifest, target)
    transfer.add(manifest.size - sum(file.size for file in files))
    if os.path.lexists(target):  # parts of files may be left
        for path in [*(file.path for file in files), *(path for path, _ in manifest.links)]:
            Path(join(target, path)).unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in manifest.folders:
        Path(join(target, folder)).mkdir(0o700, exist_ok=True)
    for path, link_target in manifest.links:
        os.symlink(link_target, join(target, path))
    read = read or partial(read_files, manifest.source)
    large = (file for file in files if file.size > SMALL)
    small = manifest.groups(file for file in files if file.size <= SMALL)
    transfer.run(
        [
            *(partial(_copy_large, manifest, target, file, transfer) for file in large),
            *(partial(_copy_group, read, target, group, transfer) for group in small),
        ]
    )
    return len(files)


def copy_file(
    source: str, target: str | Path, transfer: Transfer, *, sync: bool = False
) -> os.stat_result:
    """Copy a file to a new one with its time; return what is known of it."""
    with open(source, "rb", buffering=0) as reader:
        status = os.fstat(reader.fileno())
        mode = (status.st_mode & 0o777) | 0o600
        with open(os.open(target, WRITE_FLAGS, mode), "wb", buffering=0) as writer:
            position = 0
            while position < status.st_size:
                transfer.check()
                count = _copy_chunk(reader.fileno(), writer.fileno(), position)
                if count == 0:
                    raise source_changed(source)
                position += count
                transfer.add(count)
            os.utime(writer.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            if sync:
                os.fsync(writer.fileno())
    return status


def _copy_chunk(source: int, target: int, position: int) -> int:
    """Copy some bytes, inside the kernel where it can: not between all file systems."""
    if hasattr(os, "copy_file_range"):
        with suppress(OSError):
            count = os.copy_file_range(source, target, 8 * CHUNK, position, position)
            if count:
                return count
    content = os.pread(source, CHUNK, position)
    write_all(target, memoryview(content), position)
    return len(content)


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)


def source_changed(path: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"[data] stage: {path!r} changed while it was being staged.",
        hint="Wait until nothing writes to it.",
    )


def remove_tree(path: Path) -> bool:
    """Remove a folder, read-only parts included. Returns False if some of it stays."""
    shutil.rmtree(path, ignore_errors=True)
    for folder, folders, _ in os.walk(path):
        for each in [folder, *(os.path.join(folder, name) for name in folders)]:
            if not os.path.islink(each):
                with suppress(OSError):  # another process removes it too, or it is not ours
                    os.chmod(each, 0o700)
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def _copy_large(manifest: Manifest, target: Path, file: FileEntry, transfer: Transfer) -> None:
    source = join(manifest.source, file.path)
    status = copy_file(source, join(target, file.path), transfer)
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime):
        raise source_changed(source)


def _copy_group(read: Read, target: Path, files: Sequence[FileEntry], transfer: Transfer) -> None:
    for file, content in zip(files, read(files), strict=True):
        path = join(target, file.path)
        descriptor = os.open(path, WRITE_FLAGS, file.mode | 0o600)
        try:
            if os.write(descriptor, content) < file.size:
                write_all(descriptor, memoryview(content), 0)
            os.utime(descriptor, ns=(file.mtime, file.mtime))
        finally:
            os.close(descriptor)
    transfer.add(sum(file.size for file in files))


def _is_copied(path: str, file: FileEntry) -> bool:
    """Whether a file is complete: only then does it have the modification time of its source."""
    with suppress(OSError):
        status = os.lstat(path)
        return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime)
    return False


class Progress:
    """Says now and then how far a transfer is."""

    def __init__(self, title: str, say: Callable[[str], None]) -> None:
        self.title, self._say = title, say
        self._started = self._updated = time.monotonic()

    def show(self, transfer: Transfer) -> None:
        now = time.monotonic()
        if now - self._updated < LOG_INTERVAL or not transfer.total:
            return
        self._updated = now
        rate = transfer.done / (now - self._started)
        left = (transfer.total - transfer.done) / rate if rate else 0.0
        self._say(
            f"{self.title}: {min(1.0, transfer.done / transfer.total):.0%} of "
            f"{show_size(transfer.total)}, {show_size(rate)}/s, {left:.0f} s left"
        )
