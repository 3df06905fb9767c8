"""Packs: the small files of an item in one tar file on scratch, written by the first job and read
by every later one.

`.staged/<key>.json` has the manifest, `.staged/<key>.tar` the files. Both are renamed into place,
so an existing one is complete. Readers find a file by its offset, which follows from the manifest.
"""

from __future__ import annotations

import errno
import json
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.contract.files import open_own_file, replace_file
from paceline.contract.run_folder import write_atomically
from paceline.errors import EnvironmentProblem
from paceline.staging.copy import Read, Transfer, read_files
from paceline.staging.manifest import FileEntry, Manifest, tar_padded

UNUSED = 30 * 86400.0  # seconds after which an unused pack is removed
ABANDONED = 2 * 86400.0  # the same for an unfinished one
END_OF_TAR = 1024  # zeros


@dataclass(frozen=True)
class Packs:
    """The packs of a project. Another user's are not used: a name does not cover the content."""

    folder: Path

    def manifest_path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def pack_path(self, key: str) -> Path:
        return self.folder / f"{key}.tar"

    @contextmanager
    def open(self, manifest: Manifest) -> Iterator[Read | None]:
        """Open an item's pack to read from it; None if there is none."""
        descriptor = -1
        with suppress(OSError):
            os.utime(self.manifest_path(manifest.key))  # a used pack is not pruned
            descriptor = open_own_file(self.pack_path(manifest.key))
        try:
            yield partial(_read_packed, manifest, descriptor) if descriptor >= 0 else None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def has(self, manifest: Manifest) -> bool:
        with self.open(manifest) as read:
            return read is not None

    def read(self, key: str) -> Manifest:
        """Return what the head agent has published: other nodes need not scan the files."""
        path = self.manifest_path(key)
        try:
            with open(open_own_file(path), encoding="ascii") as file:
                return Manifest.from_values(json.load(file))
        except (OSError, ValueError, TypeError) as error:
            raise EnvironmentProblem(
                f"[data] stage: Cannot read {path}: {error}.",
                hint="The scratch folder must be on a path that all nodes share.",
            ) from None

    def publish(self, manifest: Manifest) -> None:
        """Make a manifest visible to all nodes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(manifest.values())
        write_atomically(self.manifest_path(manifest.key), text, mode=0o600)

    def write(self, manifest: Manifest, transfer: Transfer) -> None:
        """Pack the small files of an item."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._prune()
        with replace_file(self.pack_path(manifest.key), mode=0o600) as file:
            _write_tar(manifest, file.fileno(), transfer)
        self.publish(manifest)

    def _prune(self) -> None:
        """Remove packs that have not been used for long, and unfinished ones."""
        now = time.time()
        for path in self.folder.iterdir():
            # Using a pack touches its manifest.
            touched = path.with_suffix(".json") if path.suffix == ".tar" else path
            with suppress(OSError):
                age = now - (touched if touched.exists() else path).stat().st_mtime
                if age > (ABANDONED if path.suffix == ".partial" else UNUSED):
                    path.unlink()


def _read_packed(manifest: Manifest, descriptor: int, files: Sequence[FileEntry]) -> list[bytes]:
    """Return the contents of files that are close together, with one read."""
    offsets = [manifest.offsets[file.path] for file in files]
    start, end = offsets[0], offsets[-1] + files[-1].size
    data = os.pread(descriptor, end - start, start)
    if len(data) != end - start:
        raise EnvironmentProblem(
            f"[data] stage: The pack of {manifest.source!r} is truncated.",
            hint="Remove the .staged folder.",
        )
    return [
        data[offset - start : offset - start + file.size]
        for file, offset in zip(files, offsets, strict=True)
    ]


def _write_tar(manifest: Manifest, descriptor: int, transfer: Transfer) -> None:
    def write(files: Sequence[FileEntry]) -> None:
        data = bytearray()
        for file, content in zip(files, read_files(manifest.source, files), strict=True):
            data += _header(file) + content + bytes(tar_padded(file.size) - file.size)
        start = manifest.offsets[files[0].path] - len(_header(files[0]))
        if os.pwrite(descriptor, data, start) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        transfer.add(sum(file.size for file in files))

    transfer.run([partial(write, group) for group in manifest.groups(manifest.small)])
    os.ftruncate(descriptor, os.fstat(descriptor).st_size + END_OF_TAR)


def _header(file: FileEntry) -> bytes:
    member = tarfile.TarInfo(file.path)
    member.size, member.mode, member.mtime = file.size, file.mode, file.mtime // 10**9
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
