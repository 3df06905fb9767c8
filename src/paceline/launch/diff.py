"""Compare a run's snapshot with the project's current code."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files import show_size
from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import RunFolder
from paceline.errors import EnvironmentProblem
from paceline.launch.code_snapshot import find_code, list_copy
from paceline.launch.submission import run_folders_inside
from paceline.spec.run_path import run_path_of
from paceline.spec.user_files import require_own_folder

LARGE = 2**20  # bytes; the lines of larger files are not compared


@dataclass(frozen=True)
class RunDifference:
    """How a project has changed since a run was started, as one unified diff."""

    project: Path
    text: str
    note: str = ""  # what else the run uses


def compare_run(folder: RunFolder) -> RunDifference:
    """Compare the code of a run with its project as it is now. Raises an error if either is not
    there.

    Of your own runs only: the record of another user's could name any folder of yours as its
    project.
    """
    require_own_folder(folder.path, "Run")
    record = read_fields(folder.run_json)
    code, spec = record.get("code") or {}, record.get("spec") or {}
    project = Path(code.get("folder") or "")
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
    environment, settings = spec.get("environment", {}), spec.get("project", {})
    named = (project / name for name in environment.get("secret_files", ()))
    found = compare_code(
        folder.code.resolve(),
        project,
        exclude=settings.get("exclude", ()),
        exclude_paths=[*run_folders_inside(project, run_path_of(folder)), *named],
    )
    note = ""
    if record.get("backend") == "slurm" and settings.get("workdir") != "snapshot":
        note = (
            "this run imports its code from the copy, but reads other files from the project as it "
            "is now"
        )
    return RunDifference(project, "\n".join(found), note)


def compare_code(
    then: Path, now: Path, *, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> Iterator[str]:
    """Yield the lines of a diff between a snapshot and the project, by the rules that the snapshot
    was made by.
    """
    after, _ = find_code(now, exclude=exclude, exclude_paths=exclude_paths)
    contents = [
        {name: content for name in names if (content := _read(folder / name)) is not None}
        for folder, names in ((then, list_copy(then)), (now, after))
    ]
    for name in sorted({*contents[0], *contents[1]}):
        old, new = (each.get(name) for each in contents)
        if old is None or new is None:
            yield f"diff {name}: {'added' if old is None else 'removed'}"
        elif max(len(old), len(new)) > LARGE or b"\0" in old + new:
            if old != new:
                yield f"diff {name}: changed ({show_size(len(old))} -> {show_size(len(new))})"
        else:
            lines, lines_now = (each.decode(errors="replace").splitlines() for each in (old, new))
            yield from difflib.unified_diff(
                lines, lines_now, f"run/{name}", f"now/{name}", lineterm=""
            )


def _read(path: Path) -> bytes | None:
    """Return the content of a file, the target of a link, or None of a folder."""
    if path.is_symlink():
        return os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else None
