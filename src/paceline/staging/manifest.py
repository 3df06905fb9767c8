"""The contents of a staged path: its folders, files and links, and a key that changes when any of
them does.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import EnvironmentProblem
from paceline.staging.sparse import data_size

SMALL = 256 * 1024  # files up to this size are packed: opening them costs more than reading them
MIN_PACKED_FILES = 64  # fewer small files than this are copied one by one
SCAN_THREADS = 8  # where every question goes to a server, ask many at a time
BLOCK = 4096  # bytes that the smallest file takes on disk
GROUP_BYTES = 4 << 20  # small files are copied in groups of at most this size
GROUP_FILES = 256
TAR_BLOCK, TAR_NAME = 512, 100  # bytes of a tar header; longer names take a header of their own


class FileEntry(NamedTuple):
    """A file, by its path below the item; the path is empty if the item itself is the file."""

    path: str
    size: int
    mtime: int  # nanoseconds
    mode: int
    # nanoseconds; changes with every write, even if a program resets the modification time
    ctime: int


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

    def values(self) -> list[Any]:
        """Return what JSON can hold; `from_values` is the inverse."""
        counts = [self.outside_links, self.special_files, self.holes]
        return [self.source, self.folders, self.files, self.links, *counts]

    @classmethod
    def from_values(cls, values: list[Any]) -> Manifest:
        source, folders, files, links, *counts = values
        pairs = [(path, target) for path, target in links]
        return cls(source, folders, list(map(FileEntry._make, files)), pairs, *counts)

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

    @cached_property
    def small(self) -> list[FileEntry]:
        return [file for file in self.files if file.size <= SMALL]

    @property
    def needs_pack(self) -> bool:
        return len(self.small) >= MIN_PACKED_FILES

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where the content of each small file begins in the pack, a tar file."""
        offset, offsets = 0, {}
        for file in self.small:
            name = len(os.fsencode(file.path))
            offset += TAR_BLOCK if name <= TAR_NAME else 2 * TAR_BLOCK + tar_padded(name + 1)
            offsets[file.path] = offset
            offset += tar_padded(file.size)
        return offsets

    def groups(self, files: Iterable[FileEntry]) -> Iterator[list[FileEntry]]:
        """Yield small files in groups that are close together in the pack."""
        group: list[FileEntry] = []
        for file in files:
            end = self.offsets[file.path] + file.size
            is_far = group and end - self.offsets[group[0].path] > GROUP_BYTES
            if is_far or len(group) == GROUP_FILES:
                yield group
                group = []
            group.append(file)
        if group:
            yield group


def tar_padded(size: int) -> int:
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def join(root: object, path: str) -> str:
    """Return a manifest's path below a folder; the empty path is the folder itself."""
    return f"{root}/{path}" if path else str(root)


def scan(source: Path) -> Manifest:
    """Scan a path. If the path itself is a link it is followed; links inside it stay links."""
    real = os.path.realpath(source)
    try:
        status = os.stat(real)
        if stat.S_ISREG(status.st_mode):
            return Manifest(real, [], [_entry("", status)], [], holes=_holes(status, real))
        return _walk(real)
    except OSError as error:
        raise EnvironmentProblem(
            f"[data] stage: Cannot read {error.filename!r}: {error.strerror}.",
            hint="It must exist under the same name on every node, and you must be able to read "
            "it.",
        ) from None


def _walk(real: str) -> Manifest:
    manifest = Manifest(real, [""], [], [])
    outside_links = special_files = holes = 0
    pending = [""]
    with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="scan") as pool:
        while pending:
            listings = list(pool.map(partial(_list_folder, real), pending))
            pending = [folder for listing in listings for folder in listing.folders]
            manifest.folders.extend(pending)
            manifest.links.extend(link for listing in listings for link in listing.links)
            outside_links += sum(listing.outside_links for listing in listings)
            special_files += sum(listing.special_files for listing in listings)
            files = [file for listing in listings for file in listing.files]
            batches = [
                files[start : start + GROUP_FILES] for start in range(0, len(files), GROUP_FILES)
            ]
            for entries, skipped in pool.map(partial(_stat_files, real), batches):
                manifest.files.extend(entries)
                holes += skipped
    for found in (manifest.folders, manifest.files, manifest.links):
        found.sort()
    return replace(manifest, outside_links=outside_links, special_files=special_files, holes=holes)


@dataclass
class _Listing:
    """The names in a folder; its files have not been stat'ed yet."""

    folders: list[str] = field(default_factory=list)
    files: list[os.DirEntry[str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    outside_links: int = 0
    special_files: int = 0


def _list_folder(real: str, folder: str) -> _Listing:
    listing = _Listing()
    with os.scandir(join(real, folder)) as entries:
        for entry in entries:
            path = join(folder, entry.name) if folder else entry.name
            if entry.is_file(follow_symlinks=False):
                listing.files.append(entry)
            elif entry.is_symlink():
                target, is_outside = _link_target(real, folder, os.readlink(entry.path))
                listing.links.append((path, target))
                listing.outside_links += is_outside
            elif entry.is_dir():
                listing.folders.append(path)
            else:
                listing.special_files += 1
    return listing


def _stat_files(real: str, files: list[os.DirEntry[str]]) -> tuple[list[FileEntry], int]:
    """Return files, and how many bytes of the large ones are in holes."""
    found, holes = [], 0
    for file in files:
        status = file.stat(follow_symlinks=False)
        found.append(_entry(file.path[len(real) + 1 :], status))
        holes += _holes(status, file.path)
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
    if target == real or target.startswith(f"{real}/"):
        return os.path.relpath(target, parent), False
    return target, True
