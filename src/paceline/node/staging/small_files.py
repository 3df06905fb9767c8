"""Small files, a group at a time: from their source or out of a pack, into the pack and onto the node's disk.

`main` is what a helper runs: it begins with this module, which is therefore light to import.
"""

from __future__ import annotations

import marshal
import os
import signal
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.errors import EnvironmentProblem, PacelineError
from paceline.node.staging.entries import AT_ONCE, Entry, Group, at

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
AHEAD = 16  # files that are opened, and their contents asked for, before the first of them is read


class Placed(NamedTuple):
    """What became of a group."""

    sums: dict[str, int]  # of its files, where a pack is made
    pack_problem: str


class SmallFiles(NamedTuple):
    """Where the small files of an item come from and go to; what a helper is told."""

    source: str
    target: str  # empty: nowhere but into the pack
    pack: int | None  # a descriptor
    pack_is_new: bool  # written on the way; otherwise it is read instead of the files
    fresh: bool  # nothing is there yet

    def place(self, group: Group) -> Placed:
        wanted = self._missing(group.files)
        if self.pack_is_new:
            return self._pack_and_place(group, wanted)
        if wanted and self.pack is not None:
            self._write_out(group.files, self._unpacked(group), wanted)
        elif wanted:
            self._write_out(wanted, b"".join(self._read(wanted)), wanted)
        return Placed({}, "")

    def _pack_and_place(self, group: Group, wanted: Sequence[Entry]) -> Placed:
        """All are read, also those that are there already: the pack is for others."""
        contents = self._read(group.files)
        held = b"".join(contents)
        sums = {each.path: zlib.crc32(content) for each, content in zip(group.files, contents, strict=True)}
        problem = self._fill_pack(memoryview(held), group.offset)
        if self.target:
            self._write_out(group.files, held, wanted)
        return Placed(sums, problem)

    def _missing(self, files: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return files if self.fresh else tuple(each for each in files if not is_there(self.target, each))

    # -- reading ---------------------------------------------------------------------------------------

    def _unpacked(self, group: Group) -> bytes:
        assert self.pack is not None
        held = read_all(self.pack, group.size, group.offset)
        _ask_for(self.pack, group.offset + group.size, AT_ONCE)
        if len(held) != group.size:
            raise EnvironmentProblem(
                "[data] stage: a pack of small files is cut short", hint="remove .staged"
            )
        return held

    def _read(self, files: Sequence[Entry]) -> list[bytes]:
        """The disk, or the server, works on several files while one is read."""
        contents = []
        for start in range(0, len(files), AHEAD):
            portion = files[start : start + AHEAD]
            numbers: list[int] = []
            try:
                for each in portion:
                    number = os.open(at(self.source, each.path), os.O_RDONLY | os.O_CLOEXEC)
                    numbers.append(number)
                    _ask_for(number, 0, each.size)
                for number, each in zip(numbers, portion, strict=True):
                    contents.append(self._read_one(number, each))
            finally:
                for number in numbers:
                    os.close(number)
        return contents

    def _read_one(self, number: int, entry: Entry) -> bytes:
        content = os.read(number, entry.size + 1)
        while 0 < len(content) < entry.size and (more := os.read(number, entry.size + 1 - len(content))):
            content += more
        if len(content) != entry.size:
            raise changed(at(self.source, entry.path))
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

    def _write_out(self, files: Sequence[Entry], held: bytes, wanted: Sequence[Entry]) -> None:
        """`held` has the contents of all these files, one after the other; some of them are wanted."""
        view, begin = memoryview(held), 0
        only = None if len(wanted) == len(files) else set(wanted)
        folder, number = None, -1
        try:
            for each in files:
                end = begin + each.size
                if only is None or each in only:
                    here, _, base = at(self.target, each.path).rpartition("/")
                    if here != folder:  # one look-up of the folder for all files in it
                        if number >= 0:
                            os.close(number)
                        folder, number = here, os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    self._write_file(base, number, view[begin:end], each)
                begin = end
        finally:
            if number >= 0:
                os.close(number)

    def _write_file(self, base: str, folder: int, content: memoryview, entry: Entry) -> None:
        flags = FLAGS | (os.O_EXCL if self.fresh else os.O_TRUNC)
        number = os.open(base, flags, entry.mode | 0o600, dir_fd=folder)
        try:
            written = os.write(number, content)
            while written < entry.size:
                written += os.write(number, content[written:])
            os.utime(number, ns=(entry.mtime, entry.mtime))
        finally:
            os.close(number)


def is_there(target: str, entry: Entry) -> bool:
    """A file has the time of change of its source only once all of it is there."""
    try:
        about = os.lstat(at(target, entry.path))
    except OSError:
        return False
    return (about.st_size, about.st_mtime_ns) == (entry.size, entry.mtime)


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
    # What the scheduler or a terminal sends is for the launcher, which then closes the pipe.
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    told, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        files = SmallFiles(*marshal.load(told))
        while True:
            answers.write(marshal.dumps(_answer(files, Group.of(*marshal.load(told)))))
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # with nothing to flush, and nobody to tell


def _answer(files: SmallFiles, group: Group) -> tuple[Any, ...]:
    try:
        return ("placed", *files.place(group))
    except PacelineError as problem:
        return ("problem", problem.message, problem.hint)
    except OSError as problem:
        return ("system", problem.errno, problem.strerror, problem.filename)
    except Exception as problem:
        return ("problem", f"staging failed: {type(problem).__name__}: {problem}", "")
