"""Who owns a file or a folder. You may read what others have put into a shared place, but nothing
acts on it.

Some file servers give every file to one user, whoever makes it (`all_squash`). Nothing there is
another user's.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from paceline.errors import UsageError

# in a run's or sweep's folder: they say what to execute
RECORDS = ("run.json", "launch.json", "sweep.json")
ROOT = 0
# device, user, owner -> what `_gives_all_to` found out
_known: dict[tuple[int, int, int | None], bool] = {}


def is_own_folder(folder: Path) -> bool:
    """Return whether a run's or sweep's folder is this user's, with its records. One that does not
    exist yet is.

    A link counts as what it is: anybody can make one that leads to a folder of yours.
    """
    return _foreign_part(folder) is None


def require_own_folder(folder: Path, what: str) -> None:
    """Raise UsageError if a run or a sweep belongs to another user: it could execute or end
    anything in your name.
    """
    part = _foreign_part(folder)
    if part is not None:
        raise UsageError(
            f"{what} {folder.name} is not yours: {part} belongs to {owner_name(part)}.",
            hint="You can look at it (`show`, `logs`, `export`), or start a run of your own from "
            "its weights with"
            " --start-from.",
        )


def _foreign_part(folder: Path) -> Path | None:
    parts = (folder, *(folder / name for name in RECORDS))
    return next((part for part in parts if _is_foreign(part, folder)), None)


def _is_foreign(path: Path, folder: Path) -> bool:
    owner = _owner(path)
    return owner not in (None, os.geteuid()) and not _gives_all_to(owner, folder)


def is_trusted(path: Path) -> bool:
    """Return whether this user or root owns a file or a folder."""
    owner = _owner(path)
    return owner in (os.geteuid(), ROOT) or _gives_all_to(owner, path.parent)


def owner_name(path: Path) -> str:
    """Return the name of an owner, or the number of one without a name."""
    owner = _owner(path)
    try:
        return pwd.getpwuid(owner).pw_name if owner is not None else "nobody"
    except KeyError:
        return f"user {owner}"


def _gives_all_to(owner: int | None, folder: Path) -> bool:
    """Return whether a file system gives this user's new files to this other owner. Tries it out
    in the folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        key = (os.fstat(descriptor).st_dev, os.geteuid(), owner)
        if key not in _known:
            _known[key] = _new_owner(descriptor) == owner
        return _known[key]
    except OSError:  # this user cannot make files there
        return False
    finally:
        os.close(descriptor)


def _new_owner(folder: int) -> int:
    """Return who owns a file that this user makes in a folder, given by its descriptor."""
    name = f".paceline-{os.urandom(8).hex()}"
    descriptor = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return None
    except OSError:
        return -1
