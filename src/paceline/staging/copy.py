"""Copy the files of an item with several threads: small files in groups, large ones one by one."""

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
from typing import BinaryIO

from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem
from paceline.staging.manifest import SMALL, FileEntry, Manifest, join

CHUNK = 8 << 20  # bytes that are read at once
THREADS = 8  # most of the time, each waits for a disk or a server
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


def copy_item(
    manifest: Manifest, target: Path, *, transfer: Transfer, read: Read | None = None
) -> None:
    """Copy an item to a path where nothing is yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in manifest.folders:
        Path(join(target, folder)).mkdir(0o700)
    for path, link_target in manifest.links:
        os.symlink(link_target, join(target, path))
    read = read or partial(read_files, manifest.source)
    large = (file for file in manifest.files if file.size > SMALL)
    transfer.run(
        [
            *(partial(_copy_large, manifest, target, file, transfer) for file in large),
            *(
                partial(_copy_group, read, target, group, transfer)
                for group in manifest.groups(manifest.small)
            ),
        ]
    )


def copy_file(source: str, target: BinaryIO, transfer: Transfer) -> os.stat_result:
    """Copy a file's content and its time into an open file; return what is known of it."""
    with open(source, "rb", buffering=0) as reader:
        status = os.fstat(reader.fileno())
        left = status.st_size
        while left:
            transfer.check()
            content = reader.read(min(CHUNK, left))
            if not content:
                raise source_changed(source)
            target.write(content)
            transfer.add(len(content))
            left -= len(content)
    target.flush()
    os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return status


def source_changed(path: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{path!r} changed while it was being copied.", hint="Wait until nothing writes to it."
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


def _create(target: Path, file: FileEntry) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return open(os.open(join(target, file.path), flags, file.mode | 0o600), "wb")


def _copy_large(manifest: Manifest, target: Path, file: FileEntry, transfer: Transfer) -> None:
    source = join(manifest.source, file.path)
    with _create(target, file) as copy:
        status = copy_file(source, copy, transfer)
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime):
        raise source_changed(source)


def _copy_group(read: Read, target: Path, files: Sequence[FileEntry], transfer: Transfer) -> None:
    for file, content in zip(files, read(files), strict=True):
        with _create(target, file) as copy:
            copy.write(content)
            copy.flush()
            os.utime(copy.fileno(), ns=(file.mtime, file.mtime))
    transfer.add(sum(file.size for file in files))


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
