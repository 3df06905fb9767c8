"""`environment.sh` of a run: which secrets it has, and how they are removed when the run is
over.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.contract.files.shared_folders import open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.launch.environment.variables import secret_names, without_secrets


def read_secret_names(path: Path) -> list[str]:
    """Return the names of the secrets whose values a file of ours has; none if there is no such
    file.
    """
    try:
        return secret_names(_read(path))
    except OSError:
        return []


def forget_secrets(path: Path) -> bool:
    """Remove the values of the secrets, and keep their names. Return whether none are left."""
    try:
        text = _read(path)
        if secret_names(text):
            write_atomically(path, without_secrets(text), mode=0o600)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    # Any bytes: values are those of environment variables.
    with open(
        open_own_file(path, os.O_RDONLY), encoding="utf-8", errors="surrogateescape", newline="\n"
    ) as file:
        return file.read()
