"""Runs that were fetched from a cluster: where they come from, and what to type there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.contract.files.foreign_records import NUMBER, keep_valid, read_object
from paceline.contract.quote import quote
from paceline.contract.run_folder import RunFolder
from paceline.contract.run_path import is_fetched
from paceline.contract.typed_command import cluster, meant_for
from paceline.errors import ClusterError


@contextmanager
def typed_there(folder: RunFolder) -> Iterator[None]:
    """Let commands about a run that was fetched name the cluster that has it."""
    name = "" if cluster() or not is_fetched(folder) else _read(folder).get("cluster", "")
    with meant_for(name or cluster()):
        yield


def explain_status(folder: RunFolder) -> ClusterError:
    """Return why the status of a run that was fetched while it was not over is not known."""
    about = _read(folder)
    name, status = about.get("cluster", "a cluster"), about.get("status", "unknown")
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(about.get("time", 0)))
    return ClusterError(
        f"fetched from {name} on {moment}, when it was {status}",
        hint=f"To update it: paceline fetch {quote(folder.key)} --on {quote(name)}",
    )


def _read(folder: RunFolder) -> dict[str, Any]:
    try:
        return keep_valid(
            read_object(folder.fetched), {"cluster": str, "status": str, "time": NUMBER}
        )
    except (OSError, ValueError):
        return {}
