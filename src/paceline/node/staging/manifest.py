"""What a staged path holds: its folders, files and links, and the key that changes when any of them does."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from paceline.errors import EnvironmentProblem
from paceline.node.staging.entries import AT_ONCE, FILES_AT_ONCE, Entry, Group, at

SMALL = 256 * 1024  # files up to here are packed: opening them costs more than reading them
MANY = 64  # fewer small files than this are copied one by one
LOOKERS = 8  # threads that look at folders
BLOCK = 4096  # what the smallest file takes on disk


@dataclass(frozen=True)
class Manifest:
    source: str  # where it was read
    folders: list[str]  # parents first; the item's own, where it is one, is the empty path
    files: list[Entry]
    links: list[tuple[str, str]]  # where, and what it says
    outside: int = 0  # links that lead out of the item
    skipped: int = 0  # sockets, pipes and devices

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

    def to_json(self) -> str:
        return json.dumps(
            {"source": self.source, "folders": self.folders, "files": self.files, "links": self.links,
             "outside": self.outside, "skipped": self.skipped}
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        value = json.loads(text)
        value["files"] = [Entry(*each) for each in value["files"]]
        value["links"] = [(where, says) for where, says in value["links"]]
        return cls(**value)


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
    """Several folders at a time: on a shared file system each look at a file is a question to a server."""
    whole = Manifest(real, [""], [], [])
    outside = skipped = 0
    waiting = [""]
    with ThreadPoolExecutor(LOOKERS, thread_name_prefix="looking") as pool:
        while waiting:
            parts = list(pool.map(partial(_look, real), waiting))
            for part in parts:
                whole.folders.extend(part.folders)
                whole.files.extend(part.files)
                whole.links.extend(part.links)
                outside += part.outside
                skipped += part.skipped
            waiting = [folder for part in parts for folder in part.folders]
    for found in (whole.folders, whole.files, whole.links):
        found.sort()
    return replace(whole, outside=outside, skipped=skipped)


def _look(real: str, folder: str) -> Manifest:
    """One folder, without what is in the folders in it."""
    found = Manifest(real, [], [], [])
    outside = skipped = 0
    with os.scandir(at(real, folder)) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                says, leads_out = _link(real, folder, os.readlink(entry.path))
                found.links.append((path, says))
                outside += leads_out
            elif entry.is_dir():
                found.folders.append(path)
            elif entry.is_file():
                found.files.append(_entry(path, entry.stat()))
            else:
                skipped += 1
    return replace(found, outside=outside, skipped=skipped)


def _entry(path: str, about: os.stat_result) -> Entry:
    return Entry(path, about.st_size, about.st_mtime_ns, stat.S_IMODE(about.st_mode) & 0o777)


def _link(real: str, folder: str, says: str) -> tuple[str, bool]:
    """A link as it is written on the node: inside the item it stays inside, outside it leads where it led."""
    here = at(real, folder)
    target = os.path.normpath(os.path.join(here, says))
    if target == real or target.startswith(real + "/"):
        return os.path.relpath(target, here), False
    return target, True
