"""What differs between the code that a run has and the project as it is now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.runs.snapshot import find_code, read_code

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
LARGE = 2**20  # bytes: lines of such a file are compared by nobody


@dataclass(frozen=True)
class Difference:
    """One file. `lines` are those of a unified diff, without line ends; none where there is nothing to compare."""

    name: str
    kind: str  # since the run was started: added, removed or changed
    note: str = ""  # why there are no lines, or what else is different
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
    """From a copy to the project, by the rules that the copy was made by."""
    before = set(_files(then))
    after = set(find_code(now, exclude=exclude, exclude_paths=exclude_paths)[0])
    found = []
    for name in sorted(before | after):
        if name not in after:
            found.append(Difference(name, REMOVED))
        elif name not in before:
            found.append(Difference(name, ADDED))
        else:
            difference = _compare(name, read_code(then / name), read_code(now / name))
            if difference is not None:
                found.append(difference)
    return found


def _files(folder: Path) -> Iterator[str]:
    """All of a copy, but what Python has left in it since."""
    for path in folder.rglob("*"):
        if (path.is_symlink() or path.is_file()) and path.parent.name != "__pycache__":
            yield path.relative_to(folder).as_posix()


def _compare(name: str, then: tuple[str, bytes], now: tuple[str, bytes]) -> Difference | None:
    if then == now:
        return None
    note = f"{then[0]} -> {now[0]}" if then[0] != now[0] else ""
    if then[1] == now[1]:
        return Difference(name, CHANGED, note)
    if max(len(then[1]), len(now[1])) > LARGE:
        sizes = " -> ".join(f"{len(content) / 2**20:.1f} MB" for _, content in (then, now))
        return Difference(name, CHANGED, f"large: {sizes}")
    texts = [_text(content) for _, content in (then, now)]
    if texts[0] is None or texts[1] is None:
        return Difference(name, CHANGED, f"binary: {len(then[1]):,} -> {len(now[1]):,} bytes")
    lines = difflib.unified_diff(
        texts[0].splitlines(), texts[1].splitlines(), f"run/{name}", f"now/{name}", lineterm=""
    )
    # Files may differ in their line ends alone.
    told = tuple(lines)
    return Difference(name, CHANGED, note or ("" if told else "line ends"), told)


def _text(content: bytes) -> str | None:
    """A file's text; None for one that is none."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None
