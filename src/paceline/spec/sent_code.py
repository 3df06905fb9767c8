"""A project that was sent here from another machine: which files it has, and which commit they are.

The folder of a sent project has no repository. Next to it lies a file that says what git said on
the other machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.contract.env import LAPTOP_FOLDER, ON_CLUSTER, SENT_FOLDER

FILE = ".paceline-code.json"


@dataclass(frozen=True)
class SentCode:
    """What was sent. `files` maps names to kind, size and digest (of a link: its target)."""

    project: str
    files: dict[str, tuple[str, int, str]]
    commit: str | None = None
    branch: str | None = None
    changed: bool | None = None

    @property
    def digest(self) -> str:
        """Equal for equal files, whatever their commit is."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SentCode:
        values = json.loads(text)
        return cls(
            **{**values, "files": {name: tuple(each) for name, each in values["files"].items()}}
        )


def is_sent(folder: Path) -> bool:
    """Return whether a folder is a project that was sent here. Only commands that came the same
    way ask.
    """
    return bool(os.environ.get(ON_CLUSTER)) and (folder.parent / FILE).is_file()


def laptop_path(path: Path) -> Path:
    """Return a path of a project that was sent here as it is where the command was typed; any
    other path unchanged.
    """
    sent, typed = os.environ.get(SENT_FOLDER), os.environ.get(LAPTOP_FOLDER)
    return (
        Path(typed) / path.relative_to(sent)
        if sent and typed and path.is_relative_to(sent)
        else path
    )


def read_sent_code(folder: Path) -> SentCode | None:
    """Return what was sent as this folder; None if it is any other folder."""
    if not is_sent(folder):
        return None
    found = SentCode.from_json((folder.parent / FILE).read_text(encoding="utf-8"))
    return found if found.project == folder.name else None
