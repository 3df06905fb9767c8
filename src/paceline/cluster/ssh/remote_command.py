"""What `ssh` is given to run. Every value that reaches another machine's shell goes through here."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Iterable

from paceline.errors import UsageError

MAX_BYTES = 120_000  # of a command: Linux passes at most 128 KiB to the login shell


def word(text: str) -> str:
    """Return a word that a POSIX shell reads back byte for byte."""
    if "\0" in text:
        raise UsageError(f"There is a NUL character in {text!r}.", hint="Remove it: no shell can pass one on.")
    return shlex.quote(text)


def words(texts: Iterable[str]) -> str:
    return " ".join(word(text) for text in texts)


def assignments(variables: dict[str, str]) -> str:
    """Return shell text that exports variables."""
    return "".join(f"export {name}={word(value)}\n" for name, value in variables.items())


def shell_command(script: str) -> str:
    """Return a script for `sh` as a command line that bash, zsh, tcsh and fish understand alike.

    The login shell on the other side may be any of these, and they differ in quotes, `!` and newlines. None of them
    changes the characters of base64.
    """
    encoded = base64.b64encode(os.fsencode(script)).decode()
    if len(encoded) > MAX_BYTES:
        raise UsageError(
            f"This command has {len(script):,} characters, too many for one command on another machine.",
            hint="Put long arguments into a file of your project.",
        )
    return f"""exec sh -c 'eval "$(echo "$0" | base64 -d)"' {encoded}"""
