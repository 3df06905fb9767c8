"""Copy the files of an item with several threads: small files in groups, large ones one by one.

A file gets the modification time of its source only when it is complete, so an interrupted copy can
be resumed.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem
from paceline.staging.manifest import GROUP_FILES, SMALL, FileEntry, Manifest, join
from paceline.staging.sparse import data_ranges

CHUNK = 1 << 20  # bytes that are read at once
THREADS = 8  # most of the time, each waits for a disk or a server
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
LOG_INTERVAL = 10.0  # seconds between lines on progress

Task = Callable[[], object]
# Returns the contents of small files: from their source, or from a pack.
Read = Callable[[Sequence[FileEntry]], list[bytes]]


class Stopped(Exception):
    """The transfer was asked to stop."""


class CopyDiffers(EnvironmentProblem):
    """A copy does not have the content of its source."""


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
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="staging")
        try:
            futures = [pool.submit(self._run_task, task) for task in tasks]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _run_task(self, task: Task) -> None:
        self.check()
        task()


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
    if os.path.lexists(target):  # parts of files may be left where the source has a hole
        for path in [*(file.path for file in files), *(path for path, _ in manifest.links)]:
            with suppress(FileNotFoundError):
                os.unlink(join(target, path))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    for folder in manifest.folders:
        with suppress(FileExistsError):
            os.mkdir(join(target, folder), 0o700)
    for path, link_target in manifest.links:
        os.symlink(link_target, join(target, path))
    large = (file for file in files if file.size > SMALL)
    tasks: list[Task] = [partial(_copy_large, manifest, target, file, transfer) for file in large]
    read = read or partial(read_files, manifest.source)
    for group in manifest.groups(file for file in files if file.size <= SMALL):
        tasks.append(partial(_copy_group, read, target, group, transfer))
    transfer.run(tasks)
    return len(files)


def verify_item(
    manifest: Manifest, target: Path, *, transfer: Transfer, checksums: dict[str, int]
) -> None:
    """Compare every copy with its source; a source whose checksum is known is not read again."""

    def verify(files: Sequence[FileEntry]) -> None:
        for file in files:
            source = join(manifest.source, file.path)
            expected = checksums.get(file.path)
            if expected is None:
                expected = compute_checksum(source, transfer)
            if compute_checksum(join(target, file.path), transfer) != expected:
                raise CopyDiffers(
                    f"[data] stage: The copy of {source!r} differs from its source.",
                    hint="The source changed, or the node's disk is bad: try again, or exclude "
                    "the node.",
                )

    starts = range(0, len(manifest.files), GROUP_FILES)
    transfer.run([partial(verify, manifest.files[start : start + GROUP_FILES]) for start in starts])


def compute_checksum(path: str, transfer: Transfer) -> int:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while content := file.read(CHUNK):
            transfer.check()
            value = zlib.crc32(content, value)
    return value


def copy_file(
    source: str, target: str | Path, transfer: Transfer, *, sync: bool = False
) -> os.stat_result:
    """Copy a file to a new one with its time, and without its holes; return what is known of it."""
    with open(source, "rb", buffering=0) as reader:
        status = os.fstat(reader.fileno())
        mode = (status.st_mode & 0o777) | 0o600
        position = 0
        with open(os.open(target, WRITE_FLAGS, mode), "wb", buffering=0) as writer:
            writer.truncate(status.st_size)
            for begin, end in data_ranges(reader.fileno(), 0, status.st_size):
                transfer.add(begin - position)
                position = begin
                while position < end:
                    transfer.check()
                    count = _copy_chunk(reader.fileno(), writer.fileno(), position, end - position)
                    if count == 0:
                        raise source_changed(source)
                    position += count
                    transfer.add(count)
            transfer.add(status.st_size - position)
            os.utime(writer.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            if sync:
                os.fsync(writer.fileno())
    return status


def _copy_chunk(source: int, target: int, position: int, size: int) -> int:
    """Copy some bytes, inside the kernel where it can: not between all file systems."""
    if hasattr(os, "copy_file_range"):
        with suppress(OSError):
            count = os.copy_file_range(source, target, min(size, 8 * CHUNK), position, position)
            if count:
                return count
    content = os.pread(source, min(size, CHUNK), position)
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
    if path.is_dir() and not path.is_symlink():
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
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime)


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
