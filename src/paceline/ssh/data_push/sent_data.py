"""Which files of a path are sent: all except those that look like secrets."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.secrets.file_names import is_secret

# the folder of files that are not complete yet, next to where they go
PARTIAL = ".paceline-partial"


@dataclass
class SentData:
    path: Path
    is_folder: bool
    name: str = ""  # as it was typed: of a link, that of the link
    files: int = 0
    size: int = 0  # bytes
    secrets: list[str] = field(default_factory=list)  # left out
    # links that lead out of the folder: left out, too
    outside: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)  # those that are sent, and where they lead
    elsewhere: list[str] = field(default_factory=list)  # folders that are sent by themselves

    def part(self, name: str) -> SentData:
        """Return one of its folders by itself. Links that lead out of that one stay here, too."""
        start = f"{name}/"
        part = SentData(self.path / name, is_folder=True)
        part.links = {
            link.removeprefix(start): to
            for link, to in self.links.items()
            if link.startswith(start)
        }
        part.secrets = [each.removeprefix(start) for each in self.secrets if each.startswith(start)]
        part.outside = [each.removeprefix(start) for each in self.outside if each.startswith(start)]
        part.outside += [link for link, to in part.links.items() if not _is_safe(link, to)]
        return part

    def without(self, names: list[str]) -> SentData:
        """Return it without these folders."""
        return replace(self, elsewhere=[*self.elsewhere, *names])


def find_data(path: Path) -> SentData:
    """Return what there is to send. Raises UsageError if there is nothing, or a secret alone."""
    if not path.exists():
        raise UsageError(
            f"There is no file or folder {str(path)!r} here.", hint="Pass the path of your data."
        )
    if is_secret(path.resolve().name) or is_secret(path.name):
        raise UsageError(
            f"{path} looks like a file of secrets, so it is not sent.",
            hint="To pass secrets to runs, list their names in [environment] secrets.",
        )
    typed, path = path.name, path.resolve()  # of a link, what it leads to is sent
    name = typed if typed not in ("", "..") else path.name
    if not path.is_dir():
        return SentData(path, is_folder=False, name=name, files=1, size=path.stat().st_size)
    found = SentData(path, is_folder=True, name=name)
    for parent, folders, names in os.walk(
        path, onerror=lambda problem: found.unreadable.append(str(problem.filename))
    ):
        links = [each for each in folders if os.path.islink(os.path.join(parent, each))]
        folders[:] = [each for each in folders if each != PARTIAL]  # rsync leaves it out
        for each in (*names, *links):
            _add(
                found, os.path.join(parent, each), os.path.relpath(os.path.join(parent, each), path)
            )
    return found


def _add(found: SentData, path: str, name: str) -> None:
    if is_secret(name.replace(os.sep, "/")):
        found.secrets.append(name)
        return
    try:
        status = os.lstat(path)
        target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
    except OSError:
        return  # it has just been removed
    if target and not _is_safe(name, target):
        found.outside.append(name)
        return
    if not target and not stat.S_ISREG(status.st_mode):
        return
    if not target and not os.access(path, os.R_OK):
        found.unreadable.append(name)
    if target:
        found.links[name] = target
    found.files += 1
    found.size += 0 if target else status.st_size


def _is_safe(name: str, target: str) -> bool:
    """Whether rsync sends a link. Newer ones leave out all with `..` but at the beginning, and those that end in it."""
    parts = target.split("/")
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    is_inside = up <= name.count("/") and ".." not in parts[up:]
    return is_inside and not target.startswith("/") and not target.endswith("/..")
