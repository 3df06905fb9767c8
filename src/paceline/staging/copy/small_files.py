"""Copy small files a group at a time: from their source or out of a pack, into a new pack and onto
the node's disk.

`main` is what a helper process runs. Helpers start with this module, so it imports little: no
`typing`, and nothing of ours but errors. A file is a plain tuple (path, size, mtime, mode, ctime)
here.
"""

from __future__ import annotations

import gc
import marshal
import os
import signal
import sys
import zlib

from paceline.errors import EnvironmentProblem, PacelineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    File: TypeAlias = tuple[str, int, int, int, int]
    # checksums, if requested; why the pack was not written
    CopyResult: TypeAlias = tuple[dict[str, int], str]

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
READAHEAD = 16  # files to open, and to request from the kernel, before the first of them is read
HELPER_READAHEAD = 64  # the same in a helper, which has all its descriptors to itself


class SmallFileCopier:
    """Copies the small files of one item."""

    readahead = READAHEAD

    def __init__(
        self,
        source: str,
        target: str,
        *,
        pack: int | None = None,
        pack_is_new: bool = False,
        fresh: bool = True,
        checksum: bool = False,
    ) -> None:
        self.source, self.target = source, target  # without a target, files go into the pack only
        self.pack = pack  # a descriptor
        # written while copying; otherwise it is read instead of the files
        self.pack_is_new = pack_is_new
        self.fresh = fresh  # the target is empty
        self.checksum = checksum

    def copy(self, files: Sequence[File], *, offset: int, size: int) -> CopyResult:
        """Copy a group that begins at `offset` in the pack."""
        missing = (
            files if self.fresh else [each for each in files if not is_copied(self.target, each)]
        )
        if self.pack_is_new:
            return self._pack_and_copy(files, offset, missing)
        if missing and self.pack is not None:
            self._write_files(files, self._read_pack(offset, size), missing)
        elif missing:
            self._write_files(missing, b"".join(self._read(missing)), missing)
        return {}, ""

    def _pack_and_copy(
        self, files: Sequence[File], offset: int, missing: Sequence[File]
    ) -> CopyResult:
        """Read all files, even those already copied: other jobs will read the pack."""
        contents = self._read(files)
        data = b"".join(contents)
        checksums = {}
        if self.checksum:
            checksums = {
                path: zlib.crc32(content)
                for (path, *_), content in zip(files, contents, strict=True)
            }
        problem = self._write_pack(memoryview(data), offset)
        if self.target:
            self._write_files(files, data, missing)
        return checksums, problem

    # -- reading
    # ---------------------------------------------------------------------------------------

    def _read_pack(self, offset: int, size: int) -> bytes:
        assert self.pack is not None
        data = read_all(self.pack, size, offset)
        _start_readahead(self.pack, offset + size, size)
        if len(data) != size:
            raise EnvironmentProblem(
                "[data] stage: A pack of small files is truncated.",
                hint="Remove the .staged folder.",
            )
        return data

    def _read(self, files: Sequence[File]) -> list[bytes]:
        """Read whole files. The disk or server works on several files while one is read."""
        contents = []
        for start in range(0, len(files), self.readahead):
            batch = files[start : start + self.readahead]
            descriptors: list[int] = []
            try:
                for path, size, *_ in batch:
                    descriptor = os.open(join(self.source, path), os.O_RDONLY | os.O_CLOEXEC)
                    descriptors.append(descriptor)
                    _start_readahead(descriptor, 0, size)
                for descriptor, (path, size, *_) in zip(descriptors, batch, strict=True):
                    contents.append(self._read_one(descriptor, path, size))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        return contents

    def _read_one(self, descriptor: int, path: str, size: int) -> bytes:
        content = os.read(descriptor, size + 1)
        while 0 < len(content) < size and (more := os.read(descriptor, size + 1 - len(content))):
            content += more
        if len(content) != size:
            raise source_changed(join(self.source, path))
        return content

    # -- writing
    # ---------------------------------------------------------------------------------------

    def _write_pack(self, data: memoryview, offset: int) -> str:
        """Write into the pack. Returns the problem: a pack is for later jobs, and this one does
        without.
        """
        assert self.pack is not None
        try:
            write_all(self.pack, data, offset)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _write_files(self, files: Sequence[File], data: bytes, missing: Sequence[File]) -> None:
        """Write the missing ones of these files; `data` holds the contents of all, one after the
        other.
        """
        view, begin = memoryview(data), 0
        only = None if len(missing) == len(files) else set(missing)
        folder, descriptor = None, -1
        try:
            for file in files:
                end = begin + file[1]
                if only is None or file in only:
                    parent, _, base = join(self.target, file[0]).rpartition("/")
                    if parent != folder:  # resolve a folder once for all files in it
                        if descriptor >= 0:
                            os.close(descriptor)
                        folder, descriptor = (
                            parent,
                            os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
                        )
                    self._write_file(base, descriptor, view[begin:end], file)
                begin = end
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _write_file(self, base: str, folder: int, content: memoryview, file: File) -> None:
        _, size, mtime, mode, _ = file
        flags = WRITE_FLAGS | (os.O_EXCL if self.fresh else os.O_TRUNC)
        descriptor = os.open(base, flags, mode | 0o600, dir_fd=folder)
        try:
            written = os.write(descriptor, content)
            while written < size:
                written += os.write(descriptor, content[written:])
            os.utime(descriptor, ns=(mtime, mtime))
        finally:
            os.close(descriptor)


def join(root: object, path: str) -> str:
    """Return a manifest's path below a folder; the empty path is the folder itself."""
    return f"{root}/{path}" if path else str(root)


def is_copied(target: str, file: File) -> bool:
    """Whether a file is complete: only then does it have the modification time of its source."""
    path, size, mtime, *_ = file
    try:
        status = os.lstat(join(target, path))
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (size, mtime)


def source_changed(path: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"[data] stage: {path!r} changed while it was being staged.",
        hint="Wait until nothing writes to it.",
    )


def read_all(descriptor: int, size: int, offset: int) -> bytes:
    content = os.pread(descriptor, size, offset)
    while len(content) < size and (
        more := os.pread(descriptor, size - len(content), offset + len(content))
    ):
        content += more
    return content


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)


def _start_readahead(descriptor: int, offset: int, size: int) -> None:
    """Have the kernel fetch a part of a file in the background."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        try:
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # the read will fetch it


def main(argv: list[str]) -> None:
    """Copy the groups that arrive on stdin until the agent closes it."""
    del argv
    # Signals of the scheduler or a terminal are for the agent, which then closes the pipe.
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    gc.disable()  # nothing here has reference cycles
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    try:
        copier = SmallFileCopier(**marshal.load(requests))
        copier.readahead = HELPER_READAHEAD
        while True:
            replies.write(marshal.dumps(_reply(copier, marshal.load(requests))))
            replies.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nothing to flush, and nobody to report to


def _reply(copier: SmallFileCopier, group: tuple[int, int, list[File]]) -> tuple[Any, ...]:
    offset, size, files = group
    try:
        return ("copied", *copier.copy(files, offset=offset, size=size))
    except PacelineError as error:
        return ("error", error.message, error.hint)
    except OSError as error:
        return ("os_error", error.errno, error.strerror, error.filename)
    except Exception as error:
        return ("error", f"Staging failed: {type(error).__name__}: {error}.", "")
