"""Small files, a group at a time: from their source or out of a pack, into the pack and onto the node's disk.

`main` is what a helper runs. It begins with this module, which therefore imports little: no `typing`, and nothing of
ours but errors. To it a file is a plain (path, size, mtime, mode).
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

    File: TypeAlias = tuple[str, int, int, int]
    Placed: TypeAlias = tuple[dict[str, int], str]  # sums of files, if asked for; what is wrong with the pack

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
AHEAD = 16  # files that are opened, and their contents asked for, before the first of them is read
HELPERS_AHEAD = 64  # the same for a helper, which has all its descriptors for itself


class SmallFiles:
    """Where the small files of an item come from and go to."""

    ahead = AHEAD

    def __init__(
        self, source: str, target: str, *, pack: int | None = None, pack_is_new: bool = False, fresh: bool = True,
        sums: bool = False,
    ) -> None:  # fmt: skip
        self.source, self.target = source, target  # without a target they go nowhere but into the pack
        self.pack = pack  # a descriptor
        self.pack_is_new = pack_is_new  # written on the way; otherwise it is read instead of the files
        self.fresh = fresh  # nothing is there yet
        self.sums = sums

    def place(self, files: Sequence[File], *, offset: int, size: int) -> Placed:
        """A group that begins at `offset` in the pack."""
        wanted = files if self.fresh else [each for each in files if not is_there(self.target, each)]
        if self.pack_is_new:
            return self._pack_and_place(files, offset, wanted)
        if wanted and self.pack is not None:
            self._write_out(files, self._unpacked(offset, size), wanted)
        elif wanted:
            self._write_out(wanted, b"".join(self._read(wanted)), wanted)
        return {}, ""

    def _pack_and_place(self, files: Sequence[File], offset: int, wanted: Sequence[File]) -> Placed:
        """All are read, also those that are there already: the pack is for others."""
        contents = self._read(files)
        held = b"".join(contents)
        sums = {}
        if self.sums:
            sums = {path: zlib.crc32(content) for (path, *_), content in zip(files, contents, strict=True)}
        problem = self._fill_pack(memoryview(held), offset)
        if self.target:
            self._write_out(files, held, wanted)
        return sums, problem

    # -- reading ---------------------------------------------------------------------------------------

    def _unpacked(self, offset: int, size: int) -> bytes:
        assert self.pack is not None
        held = read_all(self.pack, size, offset)
        _ask_for(self.pack, offset + size, size)
        if len(held) != size:
            raise EnvironmentProblem(
                "[data] stage: a pack of small files is cut short", hint="remove .staged"
            )
        return held

    def _read(self, files: Sequence[File]) -> list[bytes]:
        """The disk, or the server, works on several files while one is read."""
        contents = []
        for start in range(0, len(files), self.ahead):
            portion = files[start : start + self.ahead]
            numbers: list[int] = []
            try:
                for path, size, _, _ in portion:
                    number = os.open(at(self.source, path), os.O_RDONLY | os.O_CLOEXEC)
                    numbers.append(number)
                    _ask_for(number, 0, size)
                for number, (path, size, _, _) in zip(numbers, portion, strict=True):
                    contents.append(self._read_one(number, path, size))
            finally:
                for number in numbers:
                    os.close(number)
        return contents

    def _read_one(self, number: int, path: str, size: int) -> bytes:
        content = os.read(number, size + 1)
        while 0 < len(content) < size and (more := os.read(number, size + 1 - len(content))):
            content += more
        if len(content) != size:
            raise changed(at(self.source, path))
        return content

    # -- writing ---------------------------------------------------------------------------------------

    def _fill_pack(self, held: memoryview, offset: int) -> str:
        """A pack is for later: when it cannot be written, the data goes to the node all the same."""
        assert self.pack is not None
        try:
            write_all(self.pack, held, offset)
        except OSError as problem:
            return problem.strerror or str(problem)
        return ""

    def _write_out(self, files: Sequence[File], held: bytes, wanted: Sequence[File]) -> None:
        """`held` has the contents of all these files, one after the other; some of them are wanted."""
        view, begin = memoryview(held), 0
        only = None if len(wanted) == len(files) else set(wanted)
        folder, number = None, -1
        try:
            for each in files:
                end = begin + each[1]
                if only is None or each in only:
                    here, _, base = at(self.target, each[0]).rpartition("/")
                    if here != folder:  # one look-up of the folder for all files in it
                        if number >= 0:
                            os.close(number)
                        folder, number = here, os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    self._write_file(base, number, view[begin:end], each)
                begin = end
        finally:
            if number >= 0:
                os.close(number)

    def _write_file(self, base: str, folder: int, content: memoryview, file: File) -> None:
        _, size, mtime, mode = file
        flags = FLAGS | (os.O_EXCL if self.fresh else os.O_TRUNC)
        number = os.open(base, flags, mode | 0o600, dir_fd=folder)
        try:
            written = os.write(number, content)
            while written < size:
                written += os.write(number, content[written:])
            os.utime(number, ns=(mtime, mtime))
        finally:
            os.close(number)


def at(root: object, path: str) -> str:
    """A path of a manifest below a folder; the folder itself for the empty one."""
    return f"{root}/{path}" if path else str(root)


def is_there(target: str, file: File) -> bool:
    """A file has the time of change of its source only once all of it is there."""
    path, size, mtime, _ = file
    try:
        about = os.lstat(at(target, path))
    except OSError:
        return False
    return (about.st_size, about.st_mtime_ns) == (size, mtime)


def changed(path: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"[data] stage: {path!r} was changed while it was staged", hint="wait until nobody writes it"
    )


def read_all(number: int, size: int, offset: int) -> bytes:
    content = os.pread(number, size, offset)
    while len(content) < size and (more := os.pread(number, size - len(content), offset + len(content))):
        content += more
    return content


def write_all(number: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(number, content[done:], offset + done)


def _ask_for(number: int, offset: int, size: int) -> None:
    """Have the kernel fetch a part of a file, and not wait for it."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        try:
            os.posix_fadvise(number, offset, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # it will be read all the same


def main(argv: list[str]) -> None:
    """Place groups as they are told on the standard input, until nobody is at its other end."""
    del argv
    # What the scheduler or a terminal sends is for the agent, which then closes the pipe.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # nothing here refers to itself
    told, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        files = SmallFiles(**marshal.load(told))
        files.ahead = HELPERS_AHEAD
        while True:
            answers.write(marshal.dumps(_answer(files, marshal.load(told))))
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # with nothing to flush, and nobody to tell


def _answer(files: SmallFiles, group: tuple[int, int, list[File]]) -> tuple[Any, ...]:
    offset, size, wanted = group
    try:
        return ("placed", *files.place(wanted, offset=offset, size=size))
    except PacelineError as problem:
        return ("problem", problem.message, problem.hint)
    except OSError as problem:
        return ("system", problem.errno, problem.strerror, problem.filename)
    except Exception as problem:
        return ("problem", f"staging failed: {type(problem).__name__}: {problem}", "")
