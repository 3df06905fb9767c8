"""What this machine knows about jobs of `submit --first`, until all but one are cancelled."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import write_atomically
from paceline.spec.home_path import state_folder

_log = logging.getLogger("paceline")


@dataclass
class Race:
    """What this machine knows about jobs of which only one is to go on."""

    id: str
    folder: str  # where the command was typed
    config: str | None
    clusters: list[str]  # where there may be a job
    process: int = 0  # of the command that watches them
    is_decided: bool = False  # all that are left are to be cancelled

    @property
    def file(self) -> Path:
        return state_folder("first") / f"{self.id}.json"

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.process = os.getpid()
        write_atomically(self.file, json.dumps(asdict(self)))


def unfinished() -> list[Race]:
    """Return the races that were interrupted, and those that other commands watch."""
    found = []
    for path in sorted(state_folder("first").glob("*.json")):
        try:
            found.append(Race(**read_object(path)))
        except (OSError, ValueError, TypeError):
            continue
    return found


def remind() -> None:
    """Name the races that were interrupted: their jobs may all be in a queue."""
    for race in unfinished():
        if not _lives(race.process):
            where = ", ".join(race.clusters)
            _log.info(
                f"jobs of one `submit --first` may still wait or run on {where}; to keep only the"
                f" first of them: paceline submit --finish {race.id}"
            )


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
