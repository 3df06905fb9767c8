"""The way to a file that arrives: real folders all along, and only links that cannot leave the run folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from paceline.contract.checkpoint.names import checkpoint_step
from paceline.contract.run_folder import RunFolder
from paceline.ssh.fetch.contents import RemoteFile

RECORD = RunFolder(Path()).fetched.name  # what was fetched, in the folder of a run here


def find_obstacle(root: Path, path: Path) -> Path | None:
    """Return what is no folder on the way from `root` to a file, such as a link; None if the way is free."""
    for parent in reversed(path.relative_to(root).parents[:-1]):
        each = root / parent
        if os.path.lexists(each) and (each.is_symlink() or not each.is_dir()):
            return each
    return None


def make_way(root: Path, path: Path) -> None:
    """Make the folders of a file. What is no folder on the way is removed, and so is a folder or link in its place."""
    if (obstacle := find_obstacle(root, path)) is not None:
        obstacle.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def leave_out(files: Iterable[RemoteFile]) -> tuple[list[RemoteFile], dict[str, str]]:
    """Return the files that may come, and why others may not: the other side may list anything."""
    listed = list(files)
    folders = {
        "/".join(parts[:end])
        for parts in (each.name.split("/") for each in listed)
        for end in range(len(parts))
    }
    kept, why = [], {}
    for file in listed:
        if file.link is not None and not is_contained(file.name, file.link):
            why[file.name] = "it is a link that may lead out of the run folder"
        elif file.link is not None and _checkpoint_part(file.name):
            why[file.name] = "it is a link in a checkpoint"
        elif (folder := _repository(file.name)) is not None:
            why[folder] = "git runs commands that such a folder names"
        elif file.name.split("/")[0].lower() == RECORD:
            why[file.name] = "Paceline's own list of what it has fetched has this name"
        elif file.name in folders:
            why[file.name] = "it is a folder, too"
        else:
            kept.append(file)
    return kept, why


def _checkpoint_part(name: str) -> bool:
    """Whether a file is part of a checkpoint, or has the name of one."""
    parts = name.split("/")
    return parts[0] == "checkpoints" and (len(parts) != 2 or checkpoint_step(parts[1]) is not None)


def _repository(name: str) -> str | None:
    """Return the `.git` that a file is or lies in; None if there is none. Some file systems ignore case."""
    parts = name.split("/")
    found = (
        index for index, part in enumerate(parts) if part.lower().rstrip(". ") in (".git", "git~1")
    )
    return next(("/".join(parts[: index + 1]) for index in found), None)


def is_contained(name: str, target: str) -> bool:
    """Whether a link leads to a place in the run folder, whatever other such links there are.

    It may go up through its own folders, which are real ones, and then only down: after a link, `..` is another folder
    than it seems.
    """
    parts = target.split("/")
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return (
        bool(target)
        and not target.startswith("/")
        and "\0" not in target
        and up <= name.count("/")
        and (".." not in parts[up:])
    )
