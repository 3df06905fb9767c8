"""Where runs live: `<scratch>/<project>/<experiment>/<run-id>`. All runs of a scratch folder."""

from __future__ import annotations

import datetime
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.foreign_records import read_fields
from paceline.contract.run_folder import TRIALS, RunFolder

STORE = ".snapshots"
# what no name has: control characters, backslashes, and what is no name of a file
_NOT = r"/\x00-\x1f\x7f\\\ud800-\udc7f\udd00-\udfff"
_NAME = rf"[^.{_NOT}][^{_NOT}]{{0,199}}"
# A project's folder may begin with a dot.
_RUN_PATH = re.compile(rf"\.?{_NAME}/{_NAME}/{_NAME}(/{TRIALS}/[0-9]{{1,9}})?")


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


def new_run_id(now: datetime.datetime | None = None) -> str:
    """Return an id that sorts by time, and differs from others of the same second."""
    moment = now or datetime.datetime.now()
    return f"{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def is_run_path(path: str) -> bool:
    """Return whether this is the path of a run, a sweep or a trial in a scratch folder."""
    return _RUN_PATH.fullmatch(path) is not None and not path.startswith(f"{STORE}/")


def run_path_of(folder: RunFolder) -> RunPath:
    """Return the run path of an existing run. A sweep's trials lie in the sweep's folder."""
    path = folder.path.absolute()
    if path.parent.name == TRIALS and path.name.isdigit():
        sweep = run_path_of(RunFolder(path.parent.parent))
        return RunPath(
            sweep.scratch, sweep.project, f"{sweep.experiment}/{sweep.run_id}/{TRIALS}", path.name
        )
    return RunPath(path.parent.parent.parent, path.parent.parent.name, path.parent.name, path.name)


def list_folders(scratch: Path, record: str) -> Iterator[str]:
    """Yield the folders of runs (`run.json`) or sweeps (`sweep.json`), by name and from the last
    one.

    Nothing but names is read of those that the caller does not come to.
    """
    return (path for path in all_folders(scratch) if os.path.lexists(f"{path}/{record}"))


def all_folders(scratch: Path) -> list[str]:
    """Return the folders of all experiments, by name and from the last one."""
    # Snapshots lie beside the runs, and may contain a file called run.json.
    experiments = [
        path
        for project in _subfolders(str(scratch))
        for path in _subfolders(project)
        if not path.endswith(f"/{STORE}")
    ]
    folders = [path for experiment in experiments for path in _subfolders(experiment)]
    folders.sort(key=lambda path: path.rpartition("/")[2], reverse=True)
    return folders


def _subfolders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted((entry.path for entry in entries if entry.is_dir()), reverse=True)
    except OSError:
        return []


def is_fetched(folder: RunFolder) -> bool:
    """Return whether a run was fetched from another cluster. A script may have written a file of
    that name, too.
    """
    return folder.arrivals.is_dir() or "cluster" in read_fields(folder.fetched)


def requeues_itself(folder: RunFolder) -> bool:
    """Whether the agents of a run may send it back into the queue, as its launch spec says."""
    return bool(read_fields(folder.launch_spec).get("requeue", True))
