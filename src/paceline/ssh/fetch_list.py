"""Which files of a run `paceline fetch` copies: its records and logs, its newest weights, or all.

This part runs on the cluster.
"""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import is_weights_file, list_checkpoints, read_marker
from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError

RECORDS, LOGS, WEIGHTS, ALL = "records", "logs", "weights", "all"
SMALL = 10 << 20  # bytes: larger results come only if asked for
LOG_FOLDERS = ("claims", "job-starts")  # and attempt-N
RECORD_FOLDERS = (*LOG_FOLDERS, "events", "system")
LOG_FILES = ("run.json", "launch.json", "job", "requeues", "cancelled", "slurm.log")
LARGE_FILES = ("paceline.zip",)
SECRETS = ("environment.sh",)  # in whatever folder of a run: they never leave the cluster
REPOSITORY = ".git"  # git runs commands that are configured there

Row = list[Any]  # the name of a file, its size, when it was changed, and the target of a link


@dataclass
class Contents:
    files: list[Row] = field(default_factory=list)
    code: list[Row] = field(default_factory=list)  # of the snapshot that `code` links to
    checkpoints: list[str] = field(default_factory=list)  # names of those that come
    left: list[Row] = field(default_factory=list)  # what stays there
    # links to elsewhere that would come, with their targets
    skipped: list[str] = field(default_factory=list)
    # files and folders that would come, with the reasons
    unreadable: dict[str, str] = field(default_factory=dict)


def choose_contents(folder: RunFolder, what: str, *, skip: Collection[str] = ()) -> Contents:
    """Return what comes. `skip` names checkpoints that have turned out to be damaged."""
    found = Contents()
    found.checkpoints = [name for name in _complete_checkpoints(folder) if name not in skip]
    if what != ALL:
        found.checkpoints = found.checkpoints[:1] if what == WEIGHTS else []
    loose_weights = what == WEIGHTS and not found.checkpoints
    project = _project(folder)
    for row in _walk(folder.path, found.unreadable):
        name, link = row[0], row[3]
        comes = _comes(row, what, found.checkpoints, folder)
        if link and not _stays_inside(name, link):
            if comes and not _is_made_by_us(name, link, folder, project):
                found.skipped.append(f"{name} -> {link}")
        elif comes or (loose_weights and is_weights_file(name)):
            found.files.append(row)
        else:
            found.left.append(row)
    if what == ALL and folder.code.is_dir():
        found.code = list(_walk(folder.code.resolve(), found.unreadable, is_code=True))
    return found


def _comes(row: Row, what: str, checkpoints: Collection[str], folder: RunFolder) -> bool:
    name, size, _, link = row
    top, _, rest = name.partition("/")
    if top == "checkpoints":  # and links to them, such as `latest`
        return rest.split("/")[0] in checkpoints or bool(what == ALL and link and "/" not in rest)
    if what == ALL:
        return True
    if what == LOGS:
        is_log = top in LOG_FOLDERS or top.startswith("attempt-")
        return name in LOG_FILES or (bool(rest) and is_log)
    if not rest:
        return top not in LARGE_FILES
    if top in RECORD_FOLDERS or top.startswith("attempt-"):
        return True
    return size <= SMALL and not (top == "work" and _is_code(row, folder))


def _is_code(row: Row, folder: RunFolder) -> bool:
    """Whether a file of the working directory, `work/<project>/<name>`, is a copy of the code."""
    original = folder.code / row[0].split("/", 2)[-1]
    try:
        known = os.lstat(original)
        if row[3] or not stat.S_ISREG(known.st_mode) or known.st_size != row[1]:
            return False
        return int(known.st_mtime) == row[2] or filecmp.cmp(
            folder.path / row[0], original, shallow=False
        )
    except OSError:
        return False


def _complete_checkpoints(folder: RunFolder) -> Iterator[str]:
    """Yield the checkpoints that have a marker, newest first."""
    for path in list_checkpoints(folder.checkpoints):
        try:
            read_marker(path)
        except CheckpointError:
            continue
        yield path.name


def _walk(root: Path, unreadable: dict[str, str], *, is_code: bool = False) -> Iterator[Row]:
    """Yield the files and links of a run, or of its code, which is the user's whatever its names.

    Adds to `unreadable` what cannot be read. What has just been removed does not count.
    """

    def note(problem: OSError) -> None:
        if not isinstance(problem, FileNotFoundError):
            name = os.path.relpath(problem.filename, root)
            unreadable[name] = problem.strerror or str(problem)

    for parent, folders, names in os.walk(root, onerror=note):
        folders[:] = sorted(name for name in folders if name != REPOSITORY)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            path = os.path.join(parent, name)
            is_temporary = name.startswith(".") and name.endswith((".partial", ".reserved"))
            if (name in SECRETS and not is_code) or is_temporary or name == REPOSITORY:
                continue
            inside = os.path.relpath(path, root)
            try:
                status = os.lstat(path)
                link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
            except OSError as problem:
                note(problem)
                continue
            if not link and stat.S_ISREG(status.st_mode) and not os.access(path, os.R_OK):
                unreadable[inside] = "Permission denied"
            elif link or stat.S_ISREG(status.st_mode):
                yield [inside, 0 if link else status.st_size, int(status.st_mtime), link]


def _stays_inside(name: str, target: str) -> bool:
    """Whether rsync copies a link: it may go up through its own folders, and then only down."""
    parts = target.split("/")
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and up <= name.count("/") and ".." not in parts[up:]


def _project(folder: RunFolder) -> str:
    """Return the live project that the working directory of a run links to; empty without one."""
    try:
        return str(read_object(folder.launch_spec)["work"]["project"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _is_made_by_us(name: str, link: str, folder: RunFolder, project: str) -> bool:
    """Whether a link to elsewhere is no result: to code, or to data in the live project."""
    if name in (folder.code.name, folder.run_half.name):
        return True
    if not name.startswith(f"{folder.work.name}/") or not project:
        return False
    inside = os.path.relpath(name, f"{folder.work.name}/{os.path.basename(project)}")
    live = {os.path.normpath(f"{each}/{inside}") for each in (project, os.path.realpath(project))}
    return link in live or os.path.islink(folder.code / inside)
