"""Results on their way back: each file whole or not at all, and never over a newer one. Smallest first."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.agent.staging.copy.transfer import Stopped, Task, Transfer, copy_range

PARTIAL = ".paceline-partial"


@dataclass
class Collected:
    files: int = 0
    size: int = 0
    older: int = 0  # files that were left, since newer ones were there
    problems: list[str] = field(default_factory=list)


class Collection:
    """What matches some patterns below `data`, to be put at the same relative paths below `destination`."""

    def __init__(
        self, data: Path, destination: Path, *, patterns: Sequence[str], staged: Sequence[str]
    ) -> None:
        self.data, self.destination = data, destination
        self.patterns, self.staged = patterns, staged
        self.found = Collected()
        self._lock = threading.Lock()

    def carry_out(self, copying: Transfer) -> Collected:
        sizes = []
        for name in self._names():
            with suppress(OSError):
                sizes.append((os.lstat(self.data / name).st_size, name))
        tasks: list[Task] = [lambda name=name: self._bring(name, copying) for _, name in sorted(sizes)]  # type: ignore[misc]
        copying.total = sum(size for size, _ in sizes)
        copying.run(tasks)
        return self.found

    def _names(self) -> list[str]:
        names: set[str] = set()
        for pattern in self.patterns:
            literal = os.path.normpath(pattern)
            matches = [literal] if os.path.lexists(self.data / literal) else self._matches(pattern)
            for match in matches:
                names.update(self._files(os.path.normpath(match)))
        return sorted(name for name in names if not self._is_staged(name))

    def _matches(self, pattern: str) -> list[str]:
        return glob.glob(pattern, root_dir=self.data, recursive=True)

    def _files(self, name: str) -> Iterator[str]:
        path = self.data / name
        if path.is_symlink() or not path.is_dir():
            yield name
            return
        for folder, folders, files in os.walk(path):
            below = os.path.relpath(folder, self.data)
            below = "" if below == "." else below + "/"
            # What was staged does not come back, and need not be looked through.
            folders[:] = [each for each in folders if not self._is_staged(below + each)]
            links = [each for each in folders if os.path.islink(os.path.join(folder, each))]
            yield from (below + each for each in [*files, *links])

    def _is_staged(self, name: str) -> bool:
        return any(name == each or name.startswith(each + "/") for each in self.staged)

    def _bring(self, name: str, copying: Transfer) -> None:
        try:
            self._bring_one(name, copying)
        except Stopped:
            raise
        except OSError as problem:
            with self._lock:
                self.found.problems.append(f"{name!r}: {problem.strerror}")

    def _bring_one(self, name: str, copying: Transfer) -> None:
        source, target = self.data / name, self.destination / name
        about = os.lstat(source)
        try:
            there = os.lstat(target)
            if (there.st_mtime_ns, there.st_size) == (about.st_mtime_ns, about.st_size):
                return
            if there.st_mtime_ns > about.st_mtime_ns:
                with self._lock:
                    self.found.older += 1
                return
        except FileNotFoundError:
            target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}"[:200] + PARTIAL)
        with suppress(FileNotFoundError):
            os.unlink(partial)
        try:
            if source.is_symlink():
                os.symlink(os.readlink(source), partial)
                os.utime(partial, ns=(about.st_atime_ns, about.st_mtime_ns), follow_symlinks=False)
            elif source.is_file():
                _copy(source, partial, about, copying)
            else:
                return
            os.replace(partial, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        with self._lock:
            self.found.files += 1
            self.found.size += about.st_size


def _copy(source: Path, partial: Path, about: os.stat_result, copying: Transfer) -> None:
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        mode = (about.st_mode & 0o777) | 0o600
        writer = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            copy_range(reader, writer, 0, about.st_size, copying)
            os.utime(writer, ns=(about.st_atime_ns, about.st_mtime_ns))
            os.fsync(writer)  # the node may be gone in a second, and its cache with it
        finally:
            os.close(writer)
    finally:
        os.close(reader)
