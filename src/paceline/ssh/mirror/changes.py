"""What has changed in a run folder since the mirror last heard of it, as frames. Runs on the cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files.shared_folders import open_regular
from paceline.ssh.mirror.frames import (
    CHUNK,
    CLAIM,
    DATA,
    GONE,
    MAX_NUMBER,
    NEW,
    NEXT,
    REPLACED,
    Frame,
)
from paceline.ssh.mirror.frames import RECORD as RECORD_FRAME
from paceline.ssh.mirror.run_files import (
    HEAD_BYTES,
    LOG,
    MAX_RECORD,
    RECORD,
    TAIL_BYTES,
    Copy,
    is_of_log,
    kind_of,
    list_claims,
    list_files,
)

Stamp = tuple[int, int, int]  # inode, size and time of last change


@dataclass
class _Growing:
    """How far a file that grows has been sent: from `first` to `offset`, with these bytes at both ends."""

    inode: int
    first: int
    offset: int
    head: bytes
    tail: bytes

    @classmethod
    def begun(cls, descriptor: int, inode: int, *, first: int, offset: int) -> _Growing:
        """What the mirror has already, up to an offset."""
        size = offset - first
        last = min(TAIL_BYTES, size)
        head, tail = (
            os.pread(descriptor, min(HEAD_BYTES, size), first),
            os.pread(descriptor, last, offset - last),
        )
        return cls(inode, first, offset, head, tail)

    def add(self, content: bytes) -> None:
        self.offset += len(content)
        self.head += content[: HEAD_BYTES - len(self.head)]
        self.tail = (self.tail + content)[-TAIL_BYTES:]

    def is_part_of(self, descriptor: int, known: os.stat_result) -> bool:
        """Whether an open file begins with what was sent. One may be cut off in place, and be as long again soon."""
        return (
            (self.inode, self.offset <= known.st_size) == (known.st_ino, True)
            and os.pread(descriptor, len(self.head), self.first) == self.head
            and os.pread(descriptor, len(self.tail), self.offset - len(self.tail)) == self.tail
        )


class RunChanges:
    """One run folder. `copies` are what the mirror has of it, `log_bytes` how much of a log is sent at first."""

    def __init__(
        self,
        scratch: Path,
        run: str,
        copies: Mapping[str, Copy],
        log_bytes: int,
        *,
        logs: bool = True,
    ) -> None:
        self.run, self.folder, self._log_bytes, self._logs = run, scratch / run, log_bytes, logs
        self._copies = dict(copies)  # until they have been compared with the files
        self._stamps: dict[str, Stamp] = {}
        self._growing: dict[str, _Growing] = {}
        self._claims: dict[int, str] = {}

    def collect(self) -> Iterator[Frame]:
        """Yield what is new.

        Small files are read before those that grow and sent after them: when the mirror learns that a run is over, it
        has all that the run had written until then.
        """
        found = list_files(self.folder)
        if not found:
            return  # it was removed, or cannot be read now: the mirror keeps what it has
        claims = {
            number: name
            for number, name in list_claims(self.folder).items()
            if self._claims.get(number) != name
        }
        read = [
            self._read_record(path, known)
            for path, known in found.items()
            if kind_of(path) == RECORD
        ]
        records = [frame for frame in read if frame is not None]
        if records:
            found |= list_files(self.folder)  # with what was written before them
        # after their times
        for path, known in sorted(found.items(), key=lambda item: kind_of(item[0]) == LOG):
            if kind_of(path) == RECORD or (is_of_log(path) and not self._logs):
                continue
            if self._stamps.get(path) != _stamp(known):
                yield from self._grow(path, is_log=kind_of(path) == LOG)
        yield from records
        for number, name in sorted(claims.items()):
            yield Frame(CLAIM, {"run": self.run, "number": number, "name": name})
        self._claims |= claims
        for path in [path for path in {**self._copies, **self._stamps} if path not in found]:
            self._copies.pop(path, None)
            self._stamps.pop(path, None)
            if kind_of(path) == RECORD:
                yield Frame(GONE, {"run": self.run, "path": path})

    def _read_record(self, path: str, known: os.stat_result) -> Frame | None:
        if self._stamps.get(path) == _stamp(known) or known.st_size > MAX_RECORD:
            return None
        copy = self._copies.pop(path, None)
        if copy is not None and (copy.size, copy.modified) == (known.st_size, _modified(known)):
            self._stamps[path] = _stamp(known)
            return None
        try:
            descriptor, now = open_regular(self.folder / path)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            content = file.read(MAX_RECORD + 1)
        if len(content) > MAX_RECORD:
            return None
        self._stamps[path] = _stamp(now)
        return Frame(
            RECORD_FRAME, {"run": self.run, "path": path, "modified": _modified(now)}, content
        )

    def _grow(self, path: str, *, is_log: bool) -> Iterator[Frame]:
        try:
            descriptor, known = open_regular(self.folder / path)
        except OSError:
            return
        try:
            begun = self._growing.get(path)
            relation = NEXT
            if begun is None or not begun.is_part_of(descriptor, known):
                first, start, relation = self._begin(path, descriptor, known, is_log=is_log)
                begun = _Growing.begun(descriptor, known.st_ino, first=first, offset=start)
                self._growing[path] = begun
            if relation != NEXT and begun.offset == known.st_size:  # an empty file is one too
                yield self._data(path, begun.offset, b"", known, relation)
            while begun.offset < known.st_size:
                content = os.pread(
                    descriptor, min(CHUNK, known.st_size - begun.offset), begun.offset
                )
                if not content:
                    return  # it has become shorter: the next time it is sent anew
                start = begun.offset
                begun.add(content)
                yield self._data(path, start, content, known, relation)
                relation = NEXT
            self._stamps[path] = _stamp(known)
        finally:
            os.close(descriptor)

    def _begin(
        self, path: str, descriptor: int, known: os.stat_result, *, is_log: bool
    ) -> tuple[int, int, int]:
        """Return where the mirror's part of a file begins, from where to send it, and how that relates to that part."""
        copy = self._copies.pop(path, None)
        first = (
            _line_start(descriptor, known.st_size - self._log_bytes, known.st_size) if is_log else 0
        )
        if (
            copy is not None
            and copy.skipped <= first
            and copy.is_part_of(descriptor, known.st_size)
        ):
            return copy.skipped, copy.size, NEXT
        return first, first, NEW if copy is None and path not in self._growing else REPLACED

    def _data(
        self, path: str, offset: int, content: bytes, known: os.stat_result, relation: int
    ) -> Frame:
        values = {
            "run": self.run,
            "path": path,
            "offset": offset,
            "relation": relation,
            "modified": _modified(known),
        }
        return Frame(DATA, values, content)


def _line_start(descriptor: int, offset: int, size: int) -> int:
    """Return where the first line begins at an offset or after it; without a line's end, the offset."""
    if offset <= 0:
        return 0
    newline = os.pread(descriptor, min(CHUNK, size - offset), offset).find(b"\n")
    return offset if newline < 0 else offset + newline + 1


def _modified(known: os.stat_result) -> int:
    """Return when a file was last changed, in nanoseconds: not before 1970, nor later than a number can say."""
    return min(max(0, known.st_mtime_ns), MAX_NUMBER)


def _stamp(known: os.stat_result) -> Stamp:
    return known.st_ino, known.st_size, known.st_mtime_ns
