"""Paths that this user may not read: the error for them, and the nearest folder above that
exists.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.spec.shell_text import cluster


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that this user can see."""
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def find_closed(path: Path) -> Path | None:
    """Return the first part of a path that is there but that this user may not read or enter."""
    for each in (*reversed(path.parents), path):
        if not os.path.exists(each):
            return None
        if not os.access(each, os.X_OK if os.path.isdir(each) else os.R_OK):
            return each
    return None


def describe_closed(closed: Path, wanted: Path | str, source: str) -> str:
    """Return the sentence about a path that cannot be used because a part of it is closed to this
    user.
    """
    where = f" on {cluster()}" if cluster() else ""
    part = "it" if str(closed) == str(wanted) else str(closed)
    return f"{wanted} cannot be used{where}: you do not have permission to read {part} ({source})."


def hint_for(keys: str, table: str) -> str:
    """Return what to do about a path that is set by a key of paceline.toml."""
    name = f"profiles.{cluster()}.{table}" if cluster() else table
    return f"Ask its owner for access, or change {keys} in [{name}] of paceline.toml."
