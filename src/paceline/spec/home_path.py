"""Paths below your home folder: those that people type with `~`, and where Paceline keeps state."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import UsageError


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
