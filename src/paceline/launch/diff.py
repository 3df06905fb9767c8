"""Compare a run's snapshot with the project's current code."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.files import show_size
from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem
from paceline.launch.code_snapshot import find_code
from paceline.launch.code_store import list_copy, read_file
from paceline.launch.submission import run_folders_inside
from paceline.spec.file_owner import is_own_folder
from paceline.spec.run_path import run_path_of

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
LARGE = 2**20  # bytes; the lines of larger files are not compared


@dataclass(frozen=True)
class Difference:
    """One file that differs. `lines` is a unified diff without line endings; empty if it cannot be
    shown.
    """

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


@dataclass(frozen=True)
class RunDifference:
    """How a project has changed since a run was started. `notes` say what else the run uses."""

    project: Path
    files: list[Difference]
    notes: list[str]

    def to_text(self) -> str:
        """Return it as one unified diff."""
        lines: list[str] = []
        for each in self.files:
            lines += each.lines or [
                f"diff {each.name}: {each.kind}{f' ({each.note})' if each.note else ''}"
            ]
        return "\n".join(lines)


def compare_run(folder: RunFolder) -> RunDifference:
    """Compare the code of a run with its project as it is now. Raises EnvironmentProblem if either
    is not there.

    Of your own runs only: the record of another user's could name any folder of yours as its
    project.
    """
    if not is_own_folder(folder.path):
        raise EnvironmentProblem(
            f"{folder.path.name} is another user's run.", hint="Compare your own runs."
        )
    record = {}
    with suppress(OSError, ValueError):
        record = read_object(folder.run_json)
    code = _table(record, "code")
    project = Path(str(code.get("folder", "")))
    if not folder.code.is_dir():
        commit = code.get("commit")
        raise EnvironmentProblem(
            f"{folder.path.name} has no copy of its code: it runs, or ran, in place.",
            hint=f"It was started from commit {commit}: git -C {project} diff {commit}"
            if commit
            else "Start runs without --no-snapshot to keep a copy.",
        )
    if not project.is_dir():
        raise EnvironmentProblem(
            f"The project of {folder.path.name} is gone: there is no folder {project}.",
            hint=f"Its code is in {folder.code}.",
        )
    environment, settings = _table(record, "spec", "environment"), _table(record, "spec", "project")
    named = _texts(environment.get("secret_files"))
    found = compare_code(
        folder.code.resolve(),
        project,
        exclude=_texts(settings.get("exclude")),
        exclude_paths=[
            *run_folders_inside(project, run_path_of(folder)),
            *(project / name for name in named),
        ],
    )
    notes = [
        f"this run uses the folder {name} of the project itself, including the code in it"
        for name in _texts(code.get("in_place"))
    ]
    if record.get("backend") == "slurm" and settings.get("workdir") != "snapshot":
        text = (
            "this run imports its code from the copy, but reads other files from the project "
            "as it is now"
        )
        notes.insert(0, text)
    return RunDifference(project, found, notes)


def _table(record: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return a table inside a record; empty if there is none. The record may be anybody's."""
    for key in keys:
        value = record.get(key)
        record = value if isinstance(value, dict) else {}
    return record


def _texts(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def compare_code(
    then: Path, now: Path, *, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> list[Difference]:
    """Return the differences between a snapshot and the project, by the rules that the snapshot
    was made by.
    """
    before = set(list_copy(then))
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
        return Difference(name, CHANGED, f"large: {' -> '.join(map(show_size, sizes))}")
    contents = [
        os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() for path in paths
    ]
    try:
        if any(b"\0" in content for content in contents):
            raise ValueError("it is binary")
        texts = [content.decode("utf-8") for content in contents]
    except ValueError:
        return Difference(name, CHANGED, f"binary: {sizes[0]:,} -> {sizes[1]:,} bytes")
    lines = tuple(
        difflib.unified_diff(
            texts[0].splitlines(), texts[1].splitlines(), f"run/{name}", f"now/{name}", lineterm=""
        )
    )
    return Difference(name, CHANGED, note or ("" if lines else "line endings"), lines)
