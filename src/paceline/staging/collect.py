"""Collect results: copy each file completely or not at all, smallest first, and never over a newer
one.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract.run_folder import write_atomically
from paceline.staging.copy.transfer import Stopped, Task, Transfer, copy_range

PARTIAL = ".paceline-partial"


@dataclass
class CollectResult:
    """What was collected."""

    files: int = 0
    size: int = 0
    outdated: int = 0  # files that were left because the destination has newer ones
    problems: list[str] = field(default_factory=list)


class Collection:
    """Copies what matches some patterns below `data` to the same relative paths below
    `destination`.

    Which of two files is newer is decided by the job starts that collected them, because their
    hosts' clocks may differ: a later job start's file wins. `claim` is the job start's number, from
    1. Times decide only within one.
    """

    def __init__(
        self,
        data: Path,
        destination: Path,
        *,
        patterns: Sequence[str],
        staged: Sequence[str],
        claim: int = 0,
    ) -> None:
        self.data, self.destination = data, destination
        self.patterns, self.staged, self.claim = patterns, staged, claim
        self.earlier = claim  # the last job start that had collected something here before
        self.result = CollectResult()
        self._lock = threading.Lock()

    def run(self, transfer: Transfer) -> CollectResult:
        if self.claim:
            self._take_turn()
        sizes = []
        for name in self._names():
            with suppress(OSError):
                sizes.append((os.lstat(self.data / name).st_size, name))
        tasks: list[Task] = [
            lambda name=name: self._collect(name, transfer)  # type: ignore[misc]
            for _, name in sorted(sizes)
        ]
        transfer.total = sum(size for size, _ in sizes)
        transfer.run(tasks)
        return self.result

    def _take_turn(self) -> None:
        """Find out which job start has collected here last, and leave this one's number for the
        next.
        """
        mark = self.destination.with_name(f".{self.destination.name}.claim")
        with suppress(OSError, ValueError):
            self.earlier = int(mark.read_text(encoding="ascii"))
        if self.claim >= self.earlier:
            with suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(mark, f"{self.claim}\n")

    def _is_outdated(self, status: os.stat_result, existing: os.stat_result) -> bool:
        if self.claim != self.earlier:
            return self.claim < self.earlier
        return existing.st_mtime_ns > status.st_mtime_ns

    def _names(self) -> list[str]:
        names: set[str] = set()
        for pattern in self.patterns:
            literal = os.path.normpath(pattern)
            exists = os.path.lexists(self.data / literal)
            matches = (
                [literal] if exists else glob.glob(pattern, root_dir=self.data, recursive=True)
            )
            for match in matches:
                names.update(self._files(os.path.normpath(match)))
        return sorted(name for name in names if not self._is_staged(name))

    def _files(self, name: str) -> Iterator[str]:
        path = self.data / name
        if path.is_symlink() or not path.is_dir():
            yield name
            return
        for folder, folders, files in os.walk(path):
            prefix = os.path.relpath(folder, self.data)
            prefix = "" if prefix == "." else prefix + "/"
            # Staged folders do not come back: no need to search them.
            folders[:] = [each for each in folders if not self._is_staged(prefix + each)]
            links = [each for each in folders if os.path.islink(os.path.join(folder, each))]
            yield from (prefix + each for each in [*files, *links])

    def _is_staged(self, name: str) -> bool:
        return any(name == each or name.startswith(each + "/") for each in self.staged)

    def _collect(self, name: str, transfer: Transfer) -> None:
        try:
            self._collect_file(name, transfer)
        except Stopped:
            raise
        except OSError as error:
            with self._lock:
                self.result.problems.append(f"{name!r}: {error.strerror}")

    def _collect_file(self, name: str, transfer: Transfer) -> None:
        source, target = self.data / name, self.destination / name
        status = os.lstat(source)
        try:
            existing = os.lstat(target)
            if (existing.st_mtime_ns, existing.st_size) == (status.st_mtime_ns, status.st_size):
                return
            if self._is_outdated(status, existing):
                with self._lock:
                    self.result.outdated += 1
                return
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}"[:200] + PARTIAL)
        with suppress(FileNotFoundError):
            os.unlink(partial)
        try:
            if source.is_symlink():
                os.symlink(os.readlink(source), partial)
                os.utime(
                    partial, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False
                )
            elif source.is_file():
                _copy(source, partial, status, transfer)
            else:
                return
            os.replace(partial, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        with self._lock:
            self.result.files += 1
            self.result.size += status.st_size


def _copy(source: Path, partial: Path, status: os.stat_result, transfer: Transfer) -> None:
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mode = (status.st_mode & 0o777) | 0o600
        writer = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.ftruncate(writer, status.st_size)
            copy_range(reader, writer, 0, status.st_size, transfer)
            os.utime(writer, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(writer)  # the node may be gone in a second, and its cache with it
        finally:
            os.close(writer)
    finally:
        os.close(reader)
