"""What a staged path holds: its folders, files and links, and the key that changes when any of them does."""

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

from paceline.agent.staging.copy.small_files import at
from paceline.errors import EnvironmentProblem

SMALL = 256 * 1024  # files up to here are packed: opening them costs more than reading them
MANY = 64  # fewer small files than this are copied one by one
LOOKERS = 8  # threads that look at files, where that takes long
PATIENCE = 0.05  # seconds of waiting after which they are called
BLOCK = 4096  # what the smallest file takes on disk
AT_ONCE = 4 << 20  # bytes of small files that one worker holds
FILES_AT_ONCE = 256

T = TypeVar("T")
R = TypeVar("R")


class Entry(NamedTuple):
    """A file, by its path below the item; empty where the item itself is the file."""

    path: str
    size: int
    mtime: int  # nanoseconds
    mode: int


class Group(NamedTuple):
    """Small files that are read and written together; `offset` is where they begin in the pack."""

    offset: int
    size: int
    files: tuple[Entry, ...]


@dataclass(frozen=True)
class Manifest:
    source: str  # where it was read
    folders: list[str]  # parents first; the item's own, where it is one, is the empty path
    files: list[Entry]
    links: list[tuple[str, str]]  # where, and what it says
    outside: int = field(default=0, compare=False)  # links that lead out of the item
    skipped: int = field(default=0, compare=False)  # sockets, pipes and devices

    @property
    def text(self) -> str:
        return json.dumps([self.source, self.folders, self.files, self.links, self.outside, self.skipped])

    @classmethod
    def of(cls, values: list[Any]) -> Manifest:
        """From what `text` says."""
        source, folders, files, links, outside, skipped = values
        links = [(where, says) for where, says in links]
        return cls(source, folders, list(map(Entry._make, files)), links, outside, skipped)

    @cached_property
    def key(self) -> str:
        """Names the content: source, paths, sizes and times of change."""
        text = json.dumps([self.source, self.folders, self.files, self.links])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.files)

    @property
    def needed(self) -> int:
        """Bytes that the item takes on disk, about."""
        blocks = sum(-(-each.size // BLOCK) for each in self.files)
        return BLOCK * (blocks + len(self.folders) + len(self.links))

    def small(self) -> list[Entry]:
        return [each for each in self.files if each.size <= SMALL]

    def large(self) -> list[Entry]:
        return [each for each in self.files if each.size > SMALL]

    @property
    def has_many_small(self) -> bool:
        return len(self.small()) >= MANY

    def groups(self) -> Iterator[Group]:
        """The small files in portions, in the order of the pack."""
        offset = begun = 0
        held: list[Entry] = []
        for each in self.small():
            if held and (offset - begun + each.size > AT_ONCE or len(held) == FILES_AT_ONCE):
                yield Group(begun, offset - begun, tuple(held))
                begun, held = offset, []
            held.append(each)
            offset += each.size
        if held:
            yield Group(begun, offset - begun, tuple(held))


def scan(source: Path) -> Manifest:
    """Look at all that a path holds. A path that is itself a link is followed; links inside stay links."""
    real = os.path.realpath(source)
    try:
        about = os.stat(real)
        if stat.S_ISREG(about.st_mode):
            return Manifest(real, [], [_entry("", about)], [])
        return _walk(real)
    except FileNotFoundError as problem:
        what = (
            "is not there" if problem.filename == real else f"lost {problem.filename} while it was looked at"
        )
        raise EnvironmentProblem(
            f"[data] stage: {str(source)!r} {what}", hint="nodes must see the path under the same name"
        ) from None
    except OSError as problem:
        raise EnvironmentProblem(
            f"[data] stage: cannot read {problem.filename!r}: {problem.strerror}",
            hint="mend its permissions, or stage less",
        ) from None


def _walk(real: str) -> Manifest:
    """Alone as long as answers come at once: threads would only be in each other's way. Where each look at a file
    is a question to a server, many at a time, also within one large folder.
    """
    whole = Manifest(real, [""], [], [])
    outside = skipped = 0
    patience = _Patience()
    waiting = [""]
    # Its threads start when they are needed, and not before.
    with ThreadPoolExecutor(LOOKERS, thread_name_prefix="looking") as pool:

        def done(work: Callable[[T], R], things: Sequence[T]) -> Iterator[R]:
            for number, thing in enumerate(things):
                if patience.is_over:
                    yield from pool.map(work, things[number:])
                    return
                yield work(thing)

        while waiting:
            found = list(done(partial(_list, real), waiting))
            for each in found:
                whole.folders.extend(each.folders)
                whole.links.extend(each.links)
                outside += each.outside
                skipped += each.skipped
            for files in done(_look, [portion for each in found for portion in each.portions()]):
                whole.files.extend(files)
            waiting = [folder for each in found for folder in each.folders]
    for paths in (whole.folders, whole.files, whole.links):
        paths.sort()
    return replace(whole, outside=outside, skipped=skipped)


class _Patience:
    """Whether more time went by in waiting than in work, and not only for a moment."""

    def __init__(self) -> None:
        self._began, self._work = time.perf_counter(), time.thread_time()

    @property
    def is_over(self) -> bool:
        work = time.thread_time() - self._work
        waited = time.perf_counter() - self._began - work
        return waited > max(PATIENCE, 2 * work)


Portion = tuple[str, list["os.DirEntry[str]"]]  # files of one folder, whose path stands before their names


@dataclass
class _Listed:
    """The names in a folder: of its files no more is known yet."""

    above: str
    folders: list[str] = field(default_factory=list)
    files: list[os.DirEntry[str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    outside: int = 0
    skipped: int = 0

    def portions(self) -> Iterator[Portion]:
        for start in range(0, len(self.files), FILES_AT_ONCE):
            yield self.above, self.files[start : start + FILES_AT_ONCE]


def _list(real: str, folder: str) -> _Listed:
    found = _Listed(f"{folder}/" if folder else "")
    with os.scandir(at(real, folder)) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                found.files.append(entry)
            elif entry.is_symlink():
                says, leads_out = _link(real, folder, os.readlink(entry.path))
                found.links.append((found.above + entry.name, says))
                found.outside += leads_out
            elif entry.is_dir():
                found.folders.append(found.above + entry.name)
            else:
                found.skipped += 1
    return found


def _look(portion: Portion) -> list[Entry]:
    above, files = portion
    return [_entry(above + each.name, each.stat(follow_symlinks=False)) for each in files]


def _entry(path: str, about: os.stat_result) -> Entry:
    return Entry(path, about.st_size, about.st_mtime_ns, about.st_mode & 0o777)


def _link(real: str, folder: str, says: str) -> tuple[str, bool]:
    """A link as it is written on the node: inside the item it stays inside, outside it leads where it led."""
    here = at(real, folder)
    target = os.path.normpath(os.path.join(here, says))
    if target == real or target.startswith(real + "/"):
        return os.path.relpath(target, here), False
    return target, True
