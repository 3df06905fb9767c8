"""Find the run or the sweep that a page names. A name is compared with what exists and never used
as a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.contract.files.file_owner import is_own_folder
from paceline.contract.run_folder import TRIALS, RunFolder
from paceline.contract.run_path import STORE
from paceline.contract.sweep.folder import SweepFolder
from paceline.errors import UsageError
from paceline.watch.records import find_runs

MAX_KEY = 300  # characters
# What the pages show of a run folder. `code` is a link out of it by design, and is read for your
# own runs alone.
_SHOWN = re.compile(
    r"run\.json|config\.json|metrics\.jsonl|events|system|attempt-\d+|slurm\.log|fitness\.json"
)


class NoSuchRun(UsageError):
    """There is no run or sweep of this name, or it is not to be shown."""


def find_key(key: str, scratch: Path, known: RunFolder | None = None) -> RunFolder:
    """Return the run with an id, or the trial SWEEP-3. `known` is where it was before. Raises
    NoSuchRun.
    """
    folder = known if known is not None and known.run_json.is_file() else None
    if folder is None:
        folder = _find(key, scratch) if 0 < len(key) <= MAX_KEY else None
    if folder is None:
        raise NoSuchRun(f"There is no run {key[:MAX_KEY]!r} in {scratch}.")
    if problem := find_link_out(folder.path, scratch):
        raise NoSuchRun(
            f"Run {key!r} is not shown: {problem} is a link that points outside the run's folder."
        )
    return folder


def _find(key: str, scratch: Path) -> RunFolder | None:
    found = [folder for folder in find_runs(scratch) if folder.path.name == key]
    if not found and (match := re.fullmatch(r"(.+)-(\d{1,9})", key)):
        sweeps = [sweep for sweep in find_sweeps(scratch) if sweep.name == match[1]]
        trials = [RunFolder(sweep.path / TRIALS / str(int(match[2]))) for sweep in sweeps]
        found = [trial for trial in trials if trial.run_json.is_file()]
    return next(
        (folder for folder in found if is_own_folder(folder.path)), found[0] if found else None
    )


def find_sweeps(scratch: Path) -> list[SweepFolder]:
    """Return the sweeps in a scratch folder, newest first."""
    found = [
        path.parent for path in scratch.glob("*/*/*/sweep.json") if path.parent.parent.name != STORE
    ]
    return [SweepFolder(path) for path in sorted(found, key=_modified, reverse=True)]


def find_trials(sweeps: Iterable[SweepFolder]) -> list[RunFolder]:
    """Return the trials of these sweeps that have started."""
    found = []
    for sweep in sweeps:
        if sweep.trials.is_symlink():
            continue
        entries = [
            entry
            for entry in _entries(sweep.trials)
            if entry.name.isdigit() and not entry.is_symlink()
        ]
        found += [
            folder
            for entry in entries
            if (folder := RunFolder(Path(entry.path))).run_json.is_file()
        ]
    return found


def find_sweep_folder(name: str, scratch: Path) -> SweepFolder:
    """Return the sweep of a name, your own first. Raises NoSuchRun."""
    found = [sweep for sweep in find_sweeps(scratch) if sweep.name == name]
    own = [sweep for sweep in found if is_own_folder(sweep.path)]
    if not found:
        raise NoSuchRun(f"There is no sweep {name[:MAX_KEY]!r} in {scratch}.")
    sweep = (own or found)[0]
    if not _is_inside(sweep.path, scratch) or not _is_inside(sweep.spec, sweep.path):
        raise NoSuchRun(
            f"Sweep {name!r} is not shown: it is a link that points outside its folder."
        )
    return sweep


def find_link_out(folder: Path, scratch: Path) -> str:
    """Return which file or folder of a run is a link to something outside of it; empty if there is
    none.

    In a shared scratch folder, another user could make one that leads to a file that only you can
    read.
    """
    if not _is_inside(folder, scratch):
        return folder.name
    for entry in _entries(folder):
        if _SHOWN.fullmatch(entry.name) is None:
            continue
        if entry.is_symlink():
            if not _is_inside(Path(entry.path), folder):
                return entry.name
        elif entry.is_dir():
            for inner in _entries(Path(entry.path)):
                if inner.is_symlink() and not _is_inside(Path(inner.path), folder):
                    return f"{entry.name}/{inner.name}"
    return ""


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from found
    except OSError:
        return


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _modified(path: Path) -> float:
    try:
        return (path / "sweep.json").stat().st_mtime
    except OSError:
        return 0.0
