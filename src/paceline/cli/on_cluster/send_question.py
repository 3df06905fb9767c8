"""Ask before a project's code or secrets go to a cluster for the first time, or when there is much more than before.

Without a terminal, Paceline doesn't ask, but reports what it sends, within the size limits of snapshots.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import console
from paceline.contract.files.foreign_records import make, read_object
from paceline.contract.files.size import show_size
from paceline.contract.files.state_folder import state_folder
from paceline.contract.run_folder import write_atomically
from paceline.errors import UsageError
from paceline.launch.secrets.declared import Secrets

if TYPE_CHECKING:
    from paceline.spec.clusters import Cluster
    from paceline.ssh.code_push.project_code import Parcel

LARGE = 50_000_000  # bytes of code: so much is asked about again, unless as much was sent before
NO_CODE = -1  # as the size of what was sent: secrets alone
SHOWN = 3  # of the largest files


@dataclass(frozen=True)
class Sent:
    """What the user has agreed to send from a project to a cluster."""

    folder: str
    host: str
    size: int
    secrets: list[str]


def ask_first(cluster: Cluster, parcel: Parcel, secrets: Secrets, *, code: bool, yes: bool) -> bool:
    """Say which secrets go to a cluster. Ask if they, or the code, have not gone there before.

    Without `code`, only settings and secrets go. Return whether it was said how much code goes. Raises UsageError for a
    no.
    """
    path = _record(cluster.host, parcel.folder)
    try:
        before = make(Sent, read_object(path))
    except (OSError, ValueError):
        before = None
    size = sum(file[1] for file in parcel.code.files.values()) if code else NO_CODE
    reasons, known = [], set(before.secrets if before is not None else ())
    if code and (before is None or before.size == NO_CODE):
        reasons.append(
            f"{_describe_code(parcel, size)} of {parcel.folder} will be sent to {cluster.name} for the first time"
        )
    elif before is not None and size > max(LARGE, 2 * before.size):
        reasons.append(
            f"{_describe_code(parcel, size)} will be sent to {cluster.name} (before: {show_size(before.size)})"
        )
    new = sorted({*secrets.values} - known)
    for line in [*reasons, *([_describe_secrets(secrets, new, cluster)] if secrets.values else [])]:
        console.say_note(line)
    if not reasons and not new:
        return False
    if not yes and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        confirm("Exclude files with .gitignore, or with exclude in [project].")
    largest = max(size, before.size if before is not None else NO_CODE)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path,
        json.dumps(asdict(Sent(str(parcel.folder), cluster.host, largest, sorted({*known, *new})))),
    )
    return bool(reasons)


def _describe_code(parcel: Parcel, size: int) -> str:
    files = sorted(((file[1], name) for name, file in parcel.code.files.items()), reverse=True)
    largest = ", ".join(f"{name} {show_size(each)}" for each, name in files[:SHOWN])
    return f"{len(files)} file{'s' * (len(files) != 1)}, {show_size(size)} ({largest})"


def _describe_secrets(secrets: Secrets, new: Sequence[str], cluster: Cluster) -> str:
    text = f"{secrets.describe()} {'goes' if len(secrets.values) == 1 else 'go'} to {cluster.name}"
    if len(new) == len(secrets.values):
        return f"{text} for the first time"
    return f"{text}, {', '.join(new)} for the first time" if new else text


def confirm(hint: str = "") -> None:
    """Ask whether to send something. Raises UsageError for a no."""
    print("Send it? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        console.say("")  # the question has a line of its own
        console.say_note("nothing was sent")
        raise
    if answer.strip().lower() not in ("y", "yes"):
        raise UsageError("Nothing was sent.", hint=hint)


def _record(host: str, folder: Path) -> Path:
    key = hashlib.sha256(f"{host}\0{folder}".encode(errors="surrogateescape")).hexdigest()[:16]
    return state_folder("sent") / f"{key}.json"
