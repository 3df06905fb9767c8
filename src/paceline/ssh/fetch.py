"""Fetch a run: ask which files it has, and copy those that are missing here.

rsync gives each file its name once it is complete. A checkpoint arrives in a folder of its own, and
gets its name once its marker confirms all its files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import find_damage, read_marker
from paceline.contract.files import show_size
from paceline.contract.foreign_records import read_object
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import CheckpointError, EnvironmentProblem, UsageError
from paceline.ssh.connection import Connection
from paceline.ssh.fetch_list import Row
from paceline.ssh.rsync import PARTIAL, Route

TRIES = 5  # of a checkpoint that is damaged there, or that the run removes meanwhile
SHOWN = 5

Version = list[Any]  # the size of a file, and when it was changed; or the target of a link
Ask = Callable[[Sequence[str]], tuple[Connection, Mapping[str, Any]]]


@dataclass
class Fetched:
    """What a command has fetched. `listing` is the last answer about the run there."""

    folder: Path
    listing: Mapping[str, Any]
    files: int = 0
    size: int = 0  # bytes
    checkpoints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # what is there and did not come, with the reasons
    missing: dict[str, str] = field(default_factory=dict)


def fetch(
    ask: Ask, choose_folder: Callable[[Mapping[str, Any]], Path], *, overwrite: bool, progress: bool
) -> Fetched:
    """Fetch a run into a folder that is chosen once it is known which run it is.

    `ask` lists what there is to fetch, without some damaged checkpoints.
    """
    connection, listing = ask([])
    made, skip = Fetched(choose_folder(listing), listing), list[str]()
    with _opened(made.folder):
        for _ in range(TRIES):
            copy = _Copy(connection, made, overwrite=overwrite, progress=progress)
            damaged = copy.run(connection.cluster.name)
            if not damaged:
                break
            made.notes += [f"{name} was left out: {why}" for name, why in damaged.items()]
            skip += damaged
            connection, made.listing = ask(skip)
    return made


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Make the folder of a run, and keep other commands away from it meanwhile."""
    folder = RunFolder(path)
    is_fetched = folder.fetched.is_file() or folder.arrivals.is_dir()
    if not is_fetched and path.exists() and any(path.iterdir()):
        raise UsageError(
            f"{path} already exists and was not created by `paceline fetch`.",
            hint="Choose another folder with --to FOLDER.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    folder.arrivals.mkdir(mode=0o700, exist_ok=True)
    with open(folder.arrivals / "lock", "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"Another command is fetching into {path}.",
                hint="Wait for it, or choose another folder: --to",
            ) from None
        yield
    shutil.rmtree(folder.arrivals, ignore_errors=True)


class _Copy:
    """One pass: what is listed comes here."""

    def __init__(
        self, connection: Connection, made: Fetched, *, overwrite: bool, progress: bool
    ) -> None:
        self.made, self.folder, self.progress = made, RunFolder(made.folder), progress
        self.overwrite, listing = overwrite, made.listing
        there, rsync = str(listing["folder"]), str(listing["rsync"])
        self.route = Route(connection, made.folder, there, rsync)
        self.staged = Route(connection, self.folder.arrivals, there, rsync)
        code = made.folder / "code"
        self.code = Route(connection, code, f"{there}/code/", rsync)
        self.known: dict[str, Version] = {}
        self.kept = set[str]()  # what was changed here alone
        try:
            self.known = dict(read_object(self.folder.fetched)["files"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        # what an earlier command that was interrupted may have brought
        self.planned: dict[str, Version] = {}
        with suppress(OSError, ValueError):
            self.planned = dict(read_object(self.folder.arrivals / "planned"))
        self.files = {**_versions(listing["files"]), **_versions(listing["code"], "code/")}

    def run(self, cluster: str) -> dict[str, str]:
        """Return the checkpoints that are not intact there, with the reasons."""
        made = self.made
        waiting = self._waiting()
        sizes = {name: self.files[name][0] for name in waiting}
        needed = sum(size for size in sizes.values() if isinstance(size, int))
        if needed > (free := shutil.disk_usage(made.folder).free):
            raise EnvironmentProblem(
                f"{made.folder} has only {show_size(free)} free, but {show_size(needed)} is needed.",
                hint="Choose another folder with --to FOLDER.",
            )
        made.missing = dict(made.listing["unreadable"])
        steps = set(made.listing["checkpoints"])
        code = [name.removeprefix("code/") for name in waiting if name.startswith("code/")]
        loose = [
            name for name in waiting if not name.startswith("code/") and _step(name) not in steps
        ]
        damaged: dict[str, str] = {}
        planned = json.dumps({**self.planned, **self.files})
        write_atomically(self.folder.arrivals / "planned", planned)
        try:
            if loose:
                self.route.pull(loose, progress=self.progress)
            if code:
                self.code.here.mkdir(exist_ok=True)
                self.code.pull(code, progress=self.progress)
            for step in made.listing["checkpoints"]:
                if any(_step(name) == step for name in waiting):
                    damaged |= self._bring_checkpoint(step)
        finally:
            self._record(cluster)
        come = [name for name in waiting if _version(made.folder / name) is not None]
        made.files += len(come)
        made.size += sum(sizes[name] for name in come if isinstance(sizes[name], int))
        left = [name for name in waiting if name not in come and _step(name) not in damaged]
        made.missing |= dict.fromkeys(left, "it changed or was removed while it was fetched")
        made.checkpoints = [name for name in made.listing["checkpoints"] if name not in damaged]
        return damaged

    def _waiting(self) -> list[str]:
        """Return the files that are not here. Raises UsageError if changes would be lost."""
        folder = self.made.folder
        here = {name: _version(folder / name) for name in {**self.files, **self.known}}
        waiting = [name for name in self.files if here[name] != self.files[name]]
        changed = [
            name
            for name in waiting
            if here[name] is not None
            and here[name] not in (self.known.get(name), self.planned.get(name))
        ]
        if self.overwrite:
            return waiting
        if lost := [name for name in changed if self.files[name] != self.known.get(name)]:
            more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
            raise UsageError(
                f"Changed in {folder} since they were fetched: {', '.join(lost[:SHOWN])}{more}.",
                hint="--overwrite replaces them; --to FOLDER fetches into another folder.",
            )
        why = "was changed here since it was fetched; --overwrite restores it"
        self.made.notes += [f"{name} {why}" for name in changed]
        self.kept = set(changed)
        return [name for name in waiting if name not in self.kept]

    def _bring_checkpoint(self, step: str) -> dict[str, str]:
        """Bring a checkpoint, and give it its name if it is intact; return it if it is not."""
        names = [name for name in self.files if _step(name) == step]
        self.staged.pull(names, progress=self.progress)
        arrived = self.folder.arrivals / "checkpoints" / step
        place = self.folder.checkpoints / step
        try:
            problem = find_damage(arrived, read_marker(arrived).files.items())
        except CheckpointError as error:
            problem = error.message.rstrip(".")
        if problem is not None:
            shutil.rmtree(arrived, ignore_errors=True)
            return {step: problem}
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        os.rename(arrived, place)
        return {}

    def _record(self, cluster: str) -> None:
        """Note what is here now, so that the next command finds what was changed here."""
        here = {name: _version(self.made.folder / name) for name in {**self.known, **self.files}}
        as_before = self.kept | (self.known.keys() - self.files.keys())
        files = {name: self.known[name] if name in as_before else here[name] for name in here}
        about = {
            "cluster": cluster,
            "folder": self.made.listing["folder"],
            "status": self.made.listing["status"],
            "time": time.time(),
            "files": {name: version for name, version in files.items() if version is not None},
        }
        write_atomically(self.folder.fetched, json.dumps(about, indent=1) + "\n")


def _versions(rows: Sequence[Row], prefix: str = "") -> dict[str, Version]:
    """Return the listed files whose names lead to a place in the run folder, but not to ours."""
    ours = (RunFolder(Path()).fetched.name, RunFolder(Path()).arrivals.name, PARTIAL)
    found = {}
    for name, size, changed, link in rows:
        parts = f"{prefix}{name}".split("/")
        if ".." not in parts and parts[0] and parts[0] not in ours and PARTIAL not in parts:
            found[f"{prefix}{name}"] = [link] if link else [size, changed]
    return found


def _version(path: Path) -> Version | None:
    try:
        if path.is_symlink():
            return [os.readlink(path)]
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, int(status.st_mtime)]


def _step(name: str) -> str:
    """Return the checkpoint that a file belongs to; empty if it is none of a checkpoint."""
    top, _, rest = name.partition("/")
    step, slash, _ = rest.partition("/")
    return step if top == "checkpoints" and slash else ""
