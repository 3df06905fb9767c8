"""Files of users: paths typed with `~`, the folder for state of yours, and who owns what.

You may read what others have put into a shared place, but nothing acts on it.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from paceline.errors import UsageError

# in a run's or sweep's folder: they say what to execute
RECORDS = ("run.json", "launch.json", "sweep.json")
ROOT = 0


def expand_home(path: Path | str) -> Path:
    """Return a path with `~` or `~user` replaced by the home folder. Raises UsageError if there is
    none.
    """
    typed, expanded = os.fspath(path), os.path.expanduser(path)
    user = expanded.split("/")[0]
    if user.startswith("~"):
        reason = f"there is no user {user[1:]!r}" if user != "~" else "HOME is not set"
        hint = f"Correct the path. If the name itself begins with ~, write ./{typed}"
        raise UsageError(f"{typed} is in no home folder: {reason}.", hint=hint)
    return Path(expanded)


def state_folder(name: str) -> Path:
    """Return a folder for state of yours that belongs to no run, such as the sandbox: below
    $XDG_STATE_HOME, or below ~/.local/state. It may not exist.
    """
    return (
        Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "paceline" / name
    )


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
    return next((part for part in parts if _owner(part) not in (None, os.geteuid())), None)


def is_trusted(path: Path) -> bool:
    """Return whether this user or root owns a file or a folder."""
    return _owner(path) in (os.geteuid(), ROOT)


def owner_name(path: Path) -> str:
    """Return the name of an owner, or the number of one without a name."""
    owner = _owner(path)
    try:
        return pwd.getpwuid(owner).pw_name if owner is not None else "nobody"
    except KeyError:
        return f"user {owner}"


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return None
    except OSError:
        return -1
