"""Where Paceline keeps state of yours that belongs to no run, such as the sandbox."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder(name: str) -> Path:
    """Return a folder below $XDG_STATE_HOME, or below ~/.local/state. It may not exist."""
    return (
        Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "paceline" / name
    )
