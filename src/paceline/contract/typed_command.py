"""Commands for the user to type. If the runs are those of a cluster over SSH, they name it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.contract.env import ON_CLUSTER
from paceline.contract.quote import command_line, quote

# whose runs this process shows; a command that came from a laptop has it in its environment
_cluster = ""


def cluster() -> str:
    """Return the cluster whose runs this process shows to somebody elsewhere; empty if it shows
    those of here.
    """
    return os.environ.get(ON_CLUSTER) or _cluster


def type_again(start: Mapping[str, Any]) -> str:
    """Return a recorded command as it is typed where the user is: the record of a run on a cluster
    has no `--on`.
    """
    command = start.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    if (name := cluster()) and words[:2] == ["paceline", "submit"]:
        words = [*words[:2], "--on", name, *words[2:]]
    return command_line(words)


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
