"""Transfer, by several workers at once: small files in groups, large ones in pieces.

A file has the time of change of its source only once all of it is there: whatever was interrupted goes on from there.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from paceline.agent.staging.copy.helpers import HelperPool
from paceline.agent.staging.copy.small_files import FLAGS, SmallFiles, at, changed, is_there, write_all
from paceline.agent.staging.manifest import Entry, Group, Manifest
from paceline.errors import EnvironmentProblem

PIECE = 64 << 20  # bytes of a large file that one worker copies
_NOT_THIS_WAY = (
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
    """Somebody wants it to end."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers() -> int:
    """More than few cores: most of the time each waits for a disk or a server."""
    return max(4, min(16, cores()))


class Transfer:
    """What is done so far, and whether to go on; shared by all workers of a node. One that is a part of another
    counts there too, and ends with it.
    """

    def __init__(self, above: Transfer | None = None) -> None:
        self.above = above
        self.stop = threading.Event()
        self.total = 0
        self.done = 0
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        return self.stop.is_set() or (self.above is not None and self.above.is_over)

    def count(self, size: int) -> None:
        with self._lock:
            self.done += size
        if self.above is not None:
            self.above.count(size)

    def run(self, tasks: Sequence[Task]) -> None:
        """All tasks, or the first error. Workers begin far apart, so that they do not meet in one folder."""
        if not tasks:
            return
        count = workers()
        stride = -(-len(tasks) // count)
        spread = [tasks[start] for first in range(stride) for start in range(first, len(tasks), stride)]
        pool = ThreadPoolExecutor(count, thread_name_prefix="staging")
        try:
            futures = [pool.submit(self._one, task) for task in spread]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [error for each in done if (error := each.exception()) is not None]
            if failed:
                raise next((error for error in failed if not isinstance(error, Stopped)), failed[0])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, task: Task) -> None:
        if self.is_over:
            raise Stopped
        try:
            task()
        except BaseException:
            self.stop.set()  # the others need not go on
            raise


class ItemCopy:
    """One item on its way to `target`, to be closed. `pack` is an archive of its small files: read, or written on
    the way; without a target nothing else is written.
    """

    def __init__(
        self, manifest: Manifest, target: Path | None, *, copying: Transfer, fresh: bool, pack: int | None = None,
        pack_is_new: bool = False, sums: bool = False,
    ) -> None:  # fmt: skip
        self.manifest, self.target, self.copying, self.fresh = manifest, str(target or ""), copying, fresh
        files = SmallFiles(
            manifest.source, self.target, pack=pack, pack_is_new=pack_is_new, fresh=fresh, sums=sums
        )
        self._hands = HelperPool(files)
        self.pack_problem = ""
        self.sums: dict[str, int] = {}  # of small files, where a pack is made and they are asked for
        self._left: dict[str, int] = {}  # pieces of a large file that are not there yet
        self._lock = threading.Lock()

    def frame(self) -> None:
        """Folders and links: few, and needed first."""
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        for folder in self.manifest.folders:
            try:
                os.mkdir(at(self.target, folder), 0o700)
            except FileExistsError:
                pass
        for where, says in self.manifest.links:
            path = at(self.target, where)
            if not self.fresh:
                _unlink(path)
            os.symlink(says, path)

    def tasks(self) -> list[Task]:
        """Large files first: they take longest."""
        return self.large_tasks() + self.small_tasks()

    def large_tasks(self) -> list[Task]:
        return [task for each in self.manifest.large() for task in self._pieces(each)]

    def small_tasks(self) -> list[Task]:
        self._hands.call(count=len(self.manifest.small()), workers=min(workers(), max(2, cores())))
        return [lambda group=group: self._place(group) for group in self.manifest.groups()]  # type: ignore[misc]

    def close(self) -> None:
        self._hands.close()

    def _place(self, group: Group) -> None:
        sums, problem = self._hands.place(group)
        self.sums.update(sums)
        self.pack_problem = self.pack_problem or problem
        self.copying.count(group.size)

    # -- large files -----------------------------------------------------------------------------------

    def _pieces(self, entry: Entry) -> list[Task]:
        if not self.fresh and is_there(self.target, entry):
            self.copying.count(entry.size)
            return []
        starts = range(0, entry.size, PIECE)
        self._left[entry.path] = len(starts)
        return [lambda start=start: self._piece(entry, start) for start in starts]  # type: ignore[misc]

    def _piece(self, entry: Entry, start: int) -> None:
        path, target = at(self.manifest.source, entry.path), at(self.target, entry.path)
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            writer = os.open(target, FLAGS, entry.mode | 0o600)
            try:
                copy_range(reader, writer, start, min(PIECE, entry.size - start), self.copying)
                with self._lock:
                    self._left[entry.path] -= 1
                    is_last = not self._left[entry.path]
                if is_last:
                    if (os.fstat(reader).st_size, os.fstat(writer).st_size) != (entry.size, entry.size):
                        raise changed(path)
                    os.utime(writer, ns=(entry.mtime, entry.mtime))
            finally:
                os.close(writer)
        finally:
            os.close(reader)

    # -- verification ----------------------------------------------------------------------------------

    def verification(self, sums: dict[str, int]) -> list[Task]:
        """Read everything again, here and there. `sums` spares reading small sources that a pack has summed up."""
        return [lambda each=each: self._verify(each, sums.get(each.path)) for each in self.manifest.files]  # type: ignore[misc]

    def _verify(self, entry: Entry, known: int | None) -> None:
        source = at(self.manifest.source, entry.path)
        expected = file_sum(source, self.copying) if known is None else known
        if file_sum(at(self.target, entry.path), self.copying) != expected:
            raise EnvironmentProblem(
                f"[data] stage: the copy of {source!r} differs from it",
                hint="it was changed meanwhile, or the node's disk is bad: try again, or leave the node out",
            )


def file_sum(path: str, copying: Transfer) -> int:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while content := file.read(4 << 20):
            if copying.is_over:
                raise Stopped
            value = zlib.crc32(content, value)
    return value


def copy_range(reader: int, writer: int, start: int, size: int, copying: Transfer) -> None:
    """A part of a file into the same part of another: inside the kernel where it can, which moves no bytes here."""
    end, position, step = start + size, start, 8 << 20
    ways = [*_IN_KERNEL, _by_hand]
    while position < end:
        if copying.is_over:
            raise Stopped
        try:
            moved = ways[0](reader, writer, min(step, end - position), position)
        except OSError as problem:
            if len(ways) == 1 or problem.errno not in _NOT_THIS_WAY:
                raise
            moved = 0
        if moved == 0:
            if len(ways) == 1:
                raise changed(f"descriptor {reader}")
            del ways[0]
            continue
        position += moved
        copying.count(moved)


def _by_range(reader: int, writer: int, count: int, position: int) -> int:
    """Within one file system, or between two of a kind: the server, or the disk, may do it by itself."""
    return os.copy_file_range(reader, writer, count, position, position)


def _by_pages(reader: int, writer: int, count: int, position: int) -> int:
    """From any file system to any other."""
    os.lseek(writer, position, os.SEEK_SET)
    return os.sendfile(writer, reader, position, count)


def _by_hand(reader: int, writer: int, count: int, position: int) -> int:
    content = os.pread(reader, count, position)
    write_all(writer, memoryview(content), position)
    return len(content)


# A Python that was built for old systems lacks the one, macOS has another thing by the name of the other.
_WAYS = {"copy_file_range": _by_range, "sendfile": _by_pages}
_IN_KERNEL = [way for name, way in _WAYS.items() if sys.platform == "linux" and hasattr(os, name)]


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def total_of(manifests: Iterable[Manifest]) -> int:
    return sum(each.size for each in manifests)
