"""The contents of a staged path: its folders, files and links, and a key that changes when any of
them does.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.contract.files.sparse import data_size
from paceline.errors import EnvironmentProblem
from paceline.staging.copy.small_files import join

SMALL = 256 * 1024  # files up to this size are packed: opening them costs more than reading them
MIN_PACKED_FILES = 64  # fewer small files than this are copied one by one
SCAN_THREADS = 8  # threads that scan where the file system is slow
SLOW_AFTER = 0.05  # seconds of waiting after which a file system counts as slow
BLOCK = 4096  # bytes that the smallest file takes on disk
GROUP_BYTES = 4 << 20  # small files are copied in groups of at most this size
GROUP_FILES = 256

T = TypeVar("T")
R = TypeVar("R")


class FileEntry(NamedTuple):
    """A file, by its path below the item; the path is empty if the item itself is the file."""

    path: str
    size: int
    mtime: int  # nanoseconds
    mode: int
    # nanoseconds; changes with every write, even if a program resets the modification time
    ctime: int


class FileGroup(NamedTuple):
    """Small files that are copied together; `offset` is where they begin in the pack."""

    offset: int
    size: int
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that one item holds."""

    source: str
    folders: list[str]  # parents first; the item's own folder is the empty path
    files: list[FileEntry]
    links: list[tuple[str, str]]  # path and target
    outside_links: int = field(default=0, compare=False)  # links that point out of the item
    # sockets, pipes and devices, which are left out
    special_files: int = field(default=0, compare=False)
    holes: int = field(default=0, compare=False)  # bytes of large files that take no space

    def to_json(self) -> str:
        counts = [self.outside_links, self.special_files, self.holes]
        return json.dumps([self.source, self.folders, self.files, self.links, *counts])

    @classmethod
    def from_values(cls, values: list[Any]) -> Manifest:
        """Rebuild a manifest from the parsed values of `to_json`."""
        source, folders, files, links, *counts = values
        links = [(path, target) for path, target in links]
        return cls(source, folders, list(map(FileEntry._make, files)), links, *counts)

    @cached_property
    def key(self) -> str:
        """A hash of source, paths, sizes, and times of modification and change."""
        text = json.dumps([self.source, self.folders, self.files, self.links])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def disk_usage(self) -> int:
        """About how many bytes the item takes on disk."""
        blocks = sum(-(-file.size // BLOCK) for file in self.files)
        return max(0, BLOCK * (blocks + len(self.folders) + len(self.links)) - self.holes)

    def small(self) -> list[FileEntry]:
        return [file for file in self.files if file.size <= SMALL]

    def large(self) -> list[FileEntry]:
        return [file for file in self.files if file.size > SMALL]

    @property
    def needs_pack(self) -> bool:
        return len(self.small()) >= MIN_PACKED_FILES

    def groups(self) -> Iterator[FileGroup]:
        """Yield the small files in groups, in the order of the pack."""
        offset = start = 0
        group: list[FileEntry] = []
        for file in self.small():
            if group and (offset - start + file.size > GROUP_BYTES or len(group) == GROUP_FILES):
                yield FileGroup(start, offset - start, tuple(group))
                start, group = offset, []
            group.append(file)
            offset += file.size
        if group:
            yield FileGroup(start, offset - start, tuple(group))


def scan(source: Path) -> Manifest:
    """Scan a path. If the path itself is a link it is followed; links inside it stay links."""
    real = os.path.realpath(source)
    try:
        status = os.stat(real)
        if stat.S_ISREG(status.st_mode):
            return Manifest(real, [], [_entry("", status)], [], holes=_holes(status, real))
        return _walk(real)
    except FileNotFoundError as error:
        what = (
            "does not exist" if error.filename == real else f"lost {error.filename} during the scan"
        )
        raise EnvironmentProblem(
            f"[data] stage: {str(source)!r} {what}.",
            hint="The path must exist under the same name on every node.",
        ) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"[data] stage: Cannot read {error.filename!r}: {error.strerror}.",
            hint="Fix its permissions, or stage less.",
        ) from None


def _walk(real: str) -> Manifest:
    """Scan a folder with one thread while answers come fast: more threads would only get in each
    other's way.

    Where every question goes to a server, ask many at a time, within one large folder too.
    """
    manifest = Manifest(real, [""], [], [])
    outside_links = special_files = holes = 0
    latency = _Latency()
    pending = [""]
    # The pool starts its threads only when they are needed.
    with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="scan") as pool:

        def each_result(work: Callable[[T], R], inputs: Sequence[T]) -> Iterator[R]:
            for number, value in enumerate(inputs):
                if latency.is_high:
                    yield from pool.map(work, inputs[number:])
                    return
                yield work(value)

        while pending:
            listings = list(each_result(partial(_list_folder, real), pending))
            for listing in listings:
                manifest.folders.extend(listing.folders)
                manifest.links.extend(listing.links)
                outside_links += listing.outside_links
                special_files += listing.special_files
            batches = [batch for listing in listings for batch in listing.batches()]
            for files, skipped in each_result(partial(_stat_files, real), batches):
                manifest.files.extend(files)
                holes += skipped
            pending = [folder for listing in listings for folder in listing.folders]
    for entries in (manifest.folders, manifest.files, manifest.links):
        entries.sort()
    return replace(manifest, outside_links=outside_links, special_files=special_files, holes=holes)


class _Latency:
    """Whether a scan spends more time waiting than working, and not only for a moment."""

    def __init__(self) -> None:
        self._started, self._worked = time.perf_counter(), time.thread_time()

    @property
    def is_high(self) -> bool:
        work = time.thread_time() - self._worked
        waited = time.perf_counter() - self._started - work
        return waited > max(SLOW_AFTER, 2 * work)


Batch = tuple[str, list["os.DirEntry[str]"]]  # files of one folder, and the prefix of their paths


@dataclass
class _Listing:
    """The names in a folder; its files have not been stat'ed yet."""

    prefix: str
    folders: list[str] = field(default_factory=list)
    files: list[os.DirEntry[str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    outside_links: int = 0
    special_files: int = 0

    def batches(self) -> Iterator[Batch]:
        for start in range(0, len(self.files), GROUP_FILES):
            yield self.prefix, self.files[start : start + GROUP_FILES]


def _list_folder(real: str, folder: str) -> _Listing:
    listing = _Listing(f"{folder}/" if folder else "")
    with os.scandir(join(real, folder)) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                listing.files.append(entry)
            elif entry.is_symlink():
                target, is_outside = _link_target(real, folder, os.readlink(entry.path))
                listing.links.append((listing.prefix + entry.name, target))
                listing.outside_links += is_outside
            elif entry.is_dir():
                listing.folders.append(listing.prefix + entry.name)
            else:
                listing.special_files += 1
    return listing


def _stat_files(real: str, batch: Batch) -> tuple[list[FileEntry], int]:
    """Return files, and how many bytes of the large ones are in holes."""
    prefix, files = batch
    found, holes = [], 0
    for file in files:
        status = file.stat(follow_symlinks=False)
        found.append(_entry(prefix + file.name, status))
        if status.st_size > SMALL:
            holes += _holes(status, join(real, prefix + file.name))
    return found, holes


def _entry(path: str, status: os.stat_result) -> FileEntry:
    return FileEntry(
        path, status.st_size, status.st_mtime_ns, status.st_mode & 0o777, status.st_ctime_ns
    )


def _holes(status: os.stat_result, path: str) -> int:
    return status.st_size - data_size(status, path) if status.st_size > SMALL else 0


def _link_target(real: str, folder: str, text: str) -> tuple[str, bool]:
    """Return a link's target on the node: relative if it is inside the item, else absolute and
    True.
    """
    parent = join(real, folder)
    target = os.path.normpath(os.path.join(parent, text))
    if target == real or target.startswith(real + "/"):
        return os.path.relpath(target, parent), False
    return target, True
