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
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import EnvironmentProblem

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

    def values(self) -> list[Any]:
        """Return what JSON can hold; `from_values` is the inverse."""
        return [self.source, self.folders, self.files, self.links]

    @classmethod
    def from_values(cls, values: list[Any]) -> Manifest:
        source, folders, files, links = values
        pairs = [(path, target) for path, target in links]
        return cls(source, folders, list(map(FileEntry._make, files)), pairs)

    @property
    def outside_links(self) -> int:
        """The number of links that point out of the item."""
        return sum(os.path.isabs(target) for _, target in self.links)

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
        return BLOCK * (blocks + len(self.folders) + len(self.links))

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
            return Manifest(real, [], [_entry("", status)], [])
        return _walk(real)
    except OSError as error:
        raise EnvironmentProblem(
            f"[data] stage: Cannot read {error.filename!r}: {error.strerror}.",
            hint="It must exist under the same name on every node, and you must be able to read "
            "it.",
        ) from None


def _walk(real: str) -> Manifest:
    """Scan a folder, one level of folders after the other. What is no file, folder or link is left
    out.
    """
    manifest, pending = Manifest(real, [""], [], []), [""]
    with ThreadPoolExecutor(SCAN_THREADS, thread_name_prefix="scan") as pool:
        while pending:
            folders, files = list[str](), list[os.DirEntry[str]]()
            for folder, entries in zip(
                pending, pool.map(partial(_list_folder, real), pending), strict=True
            ):
                for entry in entries:
                    path = join(folder, entry.name) if folder else entry.name
                    if entry.is_symlink():
                        manifest.links.append((path, _link_target(real, folder, entry.path)))
                    elif entry.is_dir():
                        folders.append(path)
                    elif entry.is_file():
                        files.append(entry)
            starts = range(0, len(files), GROUP_FILES)
            batches = [files[start : start + GROUP_FILES] for start in starts]
            for found in pool.map(partial(_stat_files, real), batches):
                manifest.files.extend(found)
            manifest.folders.extend(folders)
            pending = folders
    for names in (manifest.folders, manifest.files, manifest.links):
        names.sort()
    return manifest


def _list_folder(real: str, folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(join(real, folder)) as entries:
        return list(entries)


def _stat_files(real: str, files: list[os.DirEntry[str]]) -> list[FileEntry]:
    return [_entry(file.path[len(real) + 1 :], file.stat(follow_symlinks=False)) for file in files]


def _entry(path: str, status: os.stat_result) -> FileEntry:
    return FileEntry(
        path, status.st_size, status.st_mtime_ns, status.st_mode & 0o777, status.st_ctime_ns
    )


def _link_target(real: str, folder: str, path: str) -> str:
    """Return a link's target on the node: relative if it is inside the item, else absolute."""
    parent = join(real, folder)
    target = os.path.normpath(os.path.join(parent, os.readlink(path)))
    is_inside = target == real or target.startswith(f"{real}/")
    return os.path.relpath(target, parent) if is_inside else target
