"""Text for a shell: quoted values, and commands for the user to type.

Every value that enters a script goes through `quote`. If the runs are those of a cluster over SSH,
commands name it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from paceline.contract.env import ON_CLUSTER
from paceline.errors import UsageError


def quote(text: str) -> str:
    """Return a word that bash reads back byte for byte, on one line."""
    if "\0" in text:
        raise UsageError(
            f"There is a NUL character in {text!r}.", hint="Remove it: a shell cannot pass it on."
        )
    if text.isprintable():
        return shlex.quote(text)
    # Control characters, newlines and bytes outside UTF-8: bash's own escapes keep them on one
    # line.
    escaped = os.fsencode(text).decode("latin-1").encode("unicode_escape").decode("ascii")
    return "$'" + escaped.replace("'", "\\'") + "'"


def command_line(argv: Iterable[str]) -> str:
    """Return a command as you would type it."""
    return " ".join(quote(arg) for arg in argv)


# whose runs this process shows; a command that came from a laptop has it in its environment
_cluster = ""


def cluster() -> str:
    """Return the cluster whose runs this process shows to somebody elsewhere; empty if it shows
    those of here.
    """
    return os.environ.get(ON_CLUSTER) or _cluster


def to_type(command: str) -> str:
    """Return a command of Paceline as it is typed where the user is."""
    name = cluster()
    return f"paceline {command}{f' --on {quote(name)}' if name else ''}"


@contextmanager
def meant_for(name: str) -> Iterator[None]:
    """Let commands name this cluster."""
    global _cluster
    before, _cluster = _cluster, name
    try:
        yield
    finally:
        _cluster = before
