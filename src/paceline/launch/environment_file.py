"""`environment.sh` of a run: which secrets it has, and how they are removed when the run is
over.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.contract.files import open_own_file
from paceline.contract.run_folder import write_atomically

# Begins the line that names the secrets below it. stop_and_requeue.sh looks for it.
SECRETS_MARK = "# Secrets until the run is over:"


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


def secret_names(text: str) -> list[str]:
    """Return the names of the secrets whose values are in an environment file."""
    for line in text.splitlines():
        if line.startswith(SECRETS_MARK):
            return line[len(SECRETS_MARK) :].split()
    return []


def without_secrets(text: str) -> str:
    """Return an environment file that asks for its secrets instead of setting them, as
    stop_and_requeue.sh does.
    """
    names = secret_names(text)
    if not names:
        return text
    return f"{text[: text.index(SECRETS_MARK)]}paceline_require_secrets {' '.join(names)}\n"
