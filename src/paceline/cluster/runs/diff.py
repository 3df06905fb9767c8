"""Compare a run's snapshot with the project's current code."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.runs.snapshot import find_code
from paceline.cluster.runs.snapshot_store import read_file

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
LARGE = 2**20  # bytes; the lines of larger files are not compared


@dataclass(frozen=True)
class Difference:
    """One file that differs. `lines` is a unified diff without line endings; empty if it cannot be shown."""

    name: str
    kind: str  # added, removed or changed since the run was started
    note: str = ""  # why there are no lines, or what else changed
    lines: tuple[str, ...] = ()

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.lines[2:])

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.lines[2:])


def compare_code(
    then: Path, now: Path, *, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> list[Difference]:
    """Return the differences between a snapshot and the project, by the rules that the snapshot was made by."""
    before = set(_files(then))
    after = set(find_code(now, exclude=exclude, exclude_paths=exclude_paths)[0])
    found = []
    for name in sorted(before | after):
        if name not in after:
            found.append(Difference(name, REMOVED))
        elif name not in before:
            found.append(Difference(name, ADDED))
        else:
            difference = _compare(name, then / name, now / name)
            if difference is not None:
                found.append(difference)
    return found


def _files(folder: Path) -> Iterator[str]:
    """Yield the files of a snapshot, except the byte code that Python has added since."""
    for path in folder.rglob("*"):
        if (path.is_symlink() or path.is_file()) and path.parent.name != "__pycache__":
            yield path.relative_to(folder).as_posix()


def _compare(name: str, *paths: Path) -> Difference | None:
    """Compare a file then with the same now."""
    then, now = map(read_file, paths)
    if then == now:
        return None
    note = f"{then.kind} -> {now.kind}" if then.kind != now.kind else ""
    if then.digest == now.digest:
        return Difference(name, CHANGED, note)
    sizes = [path.lstat().st_size for path in paths]
    if max(sizes) > LARGE:
        return Difference(name, CHANGED, f"large: {' -> '.join(f'{size / 2**20:.1f} MB' for size in sizes)}")
    contents = [os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() for path in paths]
    texts = [_text(content) for content in contents]
    if texts[0] is None or texts[1] is None:
        return Difference(name, CHANGED, f"binary: {sizes[0]:,} -> {sizes[1]:,} bytes")
    lines = tuple(
        difflib.unified_diff(texts[0].splitlines(), texts[1].splitlines(), f"run/{name}", f"now/{name}", lineterm="")
    )
    return Difference(name, CHANGED, note or ("" if lines else "line endings"), lines)


def _text(content: bytes) -> str | None:
    """Return a file's text, or None if it is binary."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
