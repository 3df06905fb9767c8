"""Where a run lives: `<scratch>/<project>/<experiment>/<run-id>`."""

from __future__ import annotations

import datetime
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.contract.run_folder import TRIALS, RunFolder

STORE = ".snapshots"
_NAME = re.compile(r"[^./\x00-\x1f\x7f\\][^/\x00-\x1f\x7f\\]{0,199}")


@dataclass(frozen=True)
class RunPath:
    scratch: Path
    project: str
    experiment: str
    run_id: str

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.store.parent / self.experiment / self.run_id)

    @property
    def store(self) -> Path:
        """The snapshots of the code, shared by the runs of a project."""
        return self.scratch / self.project / STORE

    def with_new_id(self) -> RunPath:
        """Return the same path with another run id."""
        return replace(self, run_id=new_run_id())


def new_run_id(now: datetime.datetime | None = None) -> str:
    """Return an id that sorts by time, and differs from others of the same second."""
    moment = now or datetime.datetime.now()
    return f"{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def is_run_id(name: str) -> bool:
    """Return whether a text is a whole run id."""
    return re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", name) is not None


def is_run_path(path: str) -> bool:
    """Return whether this is the path of a run, a sweep or a trial in a scratch folder."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    parts = path.split("/")
    if len(parts) == 5:
        return parts[3] == TRIALS and _is_number(parts[4]) and _are_names(parts[:3])
    return len(parts) == 3 and _are_names(parts)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 10


def _are_names(parts: list[str]) -> bool:
    """Whether these are a project, an experiment and a run. A project's folder may begin with a
    dot.
    """
    project = parts[0].removeprefix(".") if parts[0] != STORE else ""
    return all(_NAME.fullmatch(part) for part in (project, *parts[1:]))
