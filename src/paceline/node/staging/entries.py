"""Files and groups of them, as everything here knows them. Light to import: helpers begin with it."""

from __future__ import annotations

from typing import NamedTuple

AT_ONCE = 4 << 20  # bytes of small files that one worker holds
FILES_AT_ONCE = 256


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

    @classmethod
    def of(cls, offset: int, size: int, entries: list[tuple[str, int, int, int]]) -> Group:
        return cls(offset, size, tuple(Entry(*each) for each in entries))


def at(root: object, path: str) -> str:
    """A path of a manifest below a folder; the folder itself for the empty one."""
    return f"{root}/{path}" if path else str(root)
