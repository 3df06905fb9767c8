"""The user's cache on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return this user's cache on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "paceline"
