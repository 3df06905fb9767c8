"""`environment.sh` of a run: which secrets it has, and how they are removed when the run is
over.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.contract.files import open_own_file
from paceline.contract.run_folder import write_atomically

# Begins the line that names the secrets below it.
SECRETS_MARK = "# Secrets until the run is over:"
# A start after the run was over takes its secrets from the shell that submits the job.
REQUIRED = (
    '[ -n "${{{0}+set}}" ] || paceline_fail "The value of {0} was removed when this run ended. '
    'Export {0}, and submit the job again."\n'
)


def read_secret_names(path: Path) -> list[str]:
    """Return the names of the secrets whose values a file of ours has; none if there is no such
    file.
    """
    try:
        return secret_names(_read(path))
    except OSError:
        return []


def forget_secrets(path: Path) -> bool:
    """Remove the values of the secrets, and keep their names: a later start asks for them. Return
    whether none are left.
    """
    try:
        text = _read(path)
        if names := secret_names(text):
            kept = text[: text.index(SECRETS_MARK)] + "".join(map(REQUIRED.format, names))
            write_atomically(path, kept, mode=0o600)
    except OSError as problem:
        return isinstance(problem, FileNotFoundError)
    return True


def _read(path: Path) -> str:
    # Any bytes: values are those of environment variables.
    with open(
        open_own_file(path, os.O_RDONLY), encoding="utf-8", errors="surrogateescape", newline="\n"
    ) as file:
        return file.read()


def secret_names(text: str) -> list[str]:
    """Return the names of the secrets whose values are in an environment file."""
    line = re.search(f"^{SECRETS_MARK}(.*)", text, re.MULTILINE)
    return line[1].split() if line else []
