"""Copy items with several threads: small files in groups, large ones in pieces.

A file gets the modification time of its source only when it is complete, so an interrupted copy can
be resumed.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from paceline.contract.files.sparse import data_ranges
from paceline.errors import EnvironmentProblem
from paceline.staging.copy.helpers import HelperPool
from paceline.staging.copy.small_files import (
    WRITE_FLAGS,
    SmallFileCopier,
    is_copied,
    join,
    source_changed,
    write_all,
)
from paceline.staging.manifest import FileEntry, FileGroup, Manifest

PIECE = 64 << 20  # bytes of a large file that one thread copies at a time
# Errors after which another way of copying may work.
_UNSUPPORTED = (
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.EIO,
)

Task = Callable[[], None]


class Stopped(Exception):
    """The transfer was asked to stop."""


class CopyDiffers(EnvironmentProblem):
    """A copy does not have the content of its source."""


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_threads() -> int:
    """Return the number of copying threads: at least 4, since most of the time each waits for a
    disk or a server.
    """
    return max(4, min(16, count_cores()))


class Transfer:
    """The progress and the stop flag that all copying threads of a node share.

    A transfer with a parent counts towards it and stops with it.
    """

    def __init__(self, parent: Transfer | None = None) -> None:
        self.parent = parent
        self.stop = threading.Event()
        self.total = 0
        self.done = 0
        self._lock = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        return self.stop.is_set() or (self.parent is not None and self.parent.is_stopped)

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
        if self.parent is not None:
            self.parent.add(size)

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, or raise the first error. Threads start far apart, so that they work in
        different folders.
        """
        if not tasks:
            return
        count = count_threads()
        stride = -(-len(tasks) // count)
        spread = [
            tasks[start] for first in range(stride) for start in range(first, len(tasks), stride)
        ]
        pool = ThreadPoolExecutor(count, thread_name_prefix="staging")
        try:
            futures = [pool.submit(self._run_task, task) for task in spread]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception()) is not None]
            if errors:
                raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _run_task(self, task: Task) -> None:
        if self.is_stopped:
            raise Stopped
        try:
            task()
        except BaseException:
            self.stop.set()  # the other threads can stop too
            raise


class ItemCopy:
    """Copies one item to `target`; must be closed.

    `pack` is an archive of its small files, read or written while copying. Without a target, only
    the pack is written.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: Path | None,
        *,
        transfer: Transfer,
        fresh: bool,
        pack: int | None = None,
        pack_is_new: bool = False,
        checksum: bool = False,
    ) -> None:
        self.manifest, self.target, self.transfer, self.fresh = (
            manifest,
            str(target or ""),
            transfer,
            fresh,
        )
        copier = SmallFileCopier(
            manifest.source,
            self.target,
            pack=pack,
            pack_is_new=pack_is_new,
            fresh=fresh,
            checksum=checksum,
        )
        self._helpers = HelperPool(copier)
        self.pack_problem = ""
        self.checksums: dict[str, int] = {}  # of the small files, if requested and the pack is new
        self._missing_pieces: dict[str, int] = {}  # of each large file
        self._lock = threading.Lock()

    def make_folders_and_links(self) -> None:
        """Make what the files need first."""
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        for folder in self.manifest.folders:
            try:
                os.mkdir(join(self.target, folder), 0o700)
            except FileExistsError:
                pass
        for path, link_target in self.manifest.links:
            link = join(self.target, path)
            if not self.fresh:
                _unlink(link)
            os.symlink(link_target, link)

    def tasks(self) -> list[Task]:
        """Return all tasks, large files first: they take longest."""
        return self.large_tasks() + self.small_tasks()

    def large_tasks(self) -> list[Task]:
        return [task for file in self.manifest.large() for task in self._piece_tasks(file)]

    def small_tasks(self) -> list[Task]:
        max_helpers = min(count_threads(), max(2, count_cores()))
        self._helpers.start(files=len(self.manifest.small()), max_helpers=max_helpers)
        return [lambda group=group: self._copy_group(group) for group in self.manifest.groups()]  # type: ignore[misc]

    def close(self) -> None:
        self._helpers.close()

    def _copy_group(self, group: FileGroup) -> None:
        checksums, problem = self._helpers.copy(group)
        self.checksums.update(checksums)
        self.pack_problem = self.pack_problem or problem
        self.transfer.add(group.size)

    # -- large files
    # -----------------------------------------------------------------------------------

    def _piece_tasks(self, file: FileEntry) -> list[Task]:
        if not self.fresh and is_copied(self.target, file):
            self.transfer.add(file.size)
            return []
        if not self.fresh:
            # what is left of it may be where the source has a hole
            _unlink(join(self.target, file.path))
        starts = range(0, file.size, PIECE)
        self._missing_pieces[file.path] = len(starts)
        return [lambda start=start: self._copy_piece(file, start) for start in starts]  # type: ignore[misc]

    def _copy_piece(self, file: FileEntry, start: int) -> None:
        path, target = join(self.manifest.source, file.path), join(self.target, file.path)
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer = os.open(target, WRITE_FLAGS, file.mode | 0o600)
            try:
                copy_range(reader, writer, start, min(PIECE, file.size - start), self.transfer)
                with self._lock:
                    self._missing_pieces[file.path] -= 1
                    is_last = not self._missing_pieces[file.path]
                if is_last:
                    if os.fstat(writer).st_size < file.size:
                        os.ftruncate(writer, file.size)  # it ends with a hole
                    if (os.fstat(reader).st_size, os.fstat(writer).st_size) != (
                        file.size,
                        file.size,
                    ):
                        raise source_changed(path)
                    os.utime(writer, ns=(file.mtime, file.mtime))
            finally:
                os.close(writer)
        finally:
            os.close(reader)

    # -- verification
    # ----------------------------------------------------------------------------------

    def verify_tasks(self, checksums: dict[str, int]) -> list[Task]:
        """Return tasks that compare every copy with its source; a source whose checksum is known
        is not read again.
        """
        files = self.manifest.files
        return [lambda file=file: self._verify(file, checksums.get(file.path)) for file in files]  # type: ignore[misc]

    def _verify(self, file: FileEntry, known: int | None) -> None:
        source = join(self.manifest.source, file.path)
        expected = compute_checksum(source, self.transfer) if known is None else known
        if compute_checksum(join(self.target, file.path), self.transfer) != expected:
            raise CopyDiffers(
                f"[data] stage: The copy of {source!r} differs from its source.",
                hint="The source changed, or the node's disk is bad: try again, or exclude the "
                "node.",
            )


def compute_checksum(path: str, transfer: Transfer) -> int:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while content := file.read(4 << 20):
            if transfer.is_stopped:
                raise Stopped
            value = zlib.crc32(content, value)
    return value


def copy_range(reader: int, writer: int, start: int, size: int, transfer: Transfer) -> None:
    """Copy a part of a file to the same offset of another, inside the kernel where it can, and
    leave out holes.
    """
    position = start
    for begin, end in data_ranges(reader, start, start + size):
        transfer.add(begin - position)
        _copy_data(reader, writer, begin, end, transfer)
        position = end
    if position < start + size and os.fstat(reader).st_size < start + size:
        raise source_changed(f"descriptor {reader}")
    transfer.add(start + size - position)


def _copy_data(reader: int, writer: int, start: int, end: int, transfer: Transfer) -> None:
    position, step = start, 8 << 20
    methods = [*_IN_KERNEL, _by_read_and_write]
    while position < end:
        if transfer.is_stopped:
            raise Stopped
        try:
            copied = methods[0](reader, writer, min(step, end - position), position)
        except OSError as error:
            if len(methods) == 1 or error.errno not in _UNSUPPORTED:
                raise
            copied = 0
        if copied == 0:
            if len(methods) == 1:
                raise source_changed(f"descriptor {reader}")
            del methods[0]
            continue
        position += copied
        transfer.add(copied)


def _by_copy_file_range(reader: int, writer: int, count: int, position: int) -> int:
    """Within one file system or between two of a kind: the server or the disk may do the
    copying.
    """
    return os.copy_file_range(reader, writer, count, position, position)


def _by_sendfile(reader: int, writer: int, count: int, position: int) -> int:
    """Between any two file systems."""
    os.lseek(writer, position, os.SEEK_SET)
    return os.sendfile(writer, reader, position, count)


def _by_read_and_write(reader: int, writer: int, count: int, position: int) -> int:
    content = os.pread(reader, count, position)
    write_all(writer, memoryview(content), position)
    return len(content)


# Python builds for old systems lack copy_file_range, and sendfile is a different call on macOS.
_METHODS = {"copy_file_range": _by_copy_file_range, "sendfile": _by_sendfile}
_IN_KERNEL = [
    method for name, method in _METHODS.items() if sys.platform == "linux" and hasattr(os, name)
]


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
