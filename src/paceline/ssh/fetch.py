"""Fetch a run: the cluster lists its files, and rsync brings those that are missing here.

`choose_contents` runs on the cluster. rsync gives each file its name once it is complete. A
checkpoint arrives in a folder of its own, and gets its name once its marker confirms all its files.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.contract.checkpoint import find_damage, is_weights_file, list_checkpoints, read_marker
from paceline.contract.foreign_records import NUMBER, read_fields
from paceline.contract.run_folder import RunFolder, write_atomically
from paceline.errors import CheckpointError, UsageError
from paceline.ssh.connection import Connection
from paceline.ssh.rsync import PARTIAL, Route, is_safe_link

TRIES = 5  # of a checkpoint that is damaged there, or that the run removes meanwhile
RECORDS, WEIGHTS, ALL = "records", "weights", "all"
SMALL = 10 << 20  # bytes: larger results come only if asked for
LOG_FOLDERS = ("claims", "job-starts")  # and attempt-N
LARGE_FILES = ("paceline.zip",)
SECRETS = ("environment.sh",)  # in whatever folder of a run: they never leave the cluster
REPOSITORY = ".git"  # git runs commands that are configured there
GONE = "it cannot be read, or it changed or was removed while it was fetched"
KEPT = "was changed here since it was fetched; --overwrite restores it"

Row = list[Any]  # the name of a file, its size, when it was changed, and the target of a link
Ask = Callable[[Sequence[str]], tuple[Connection, Mapping[str, Any]]]


# -- on the cluster: what comes


@dataclass
class Contents:
    files: list[Row] = field(default_factory=list)
    code: list[Row] = field(default_factory=list)  # of the snapshot that `code` links to
    checkpoints: list[str] = field(default_factory=list)  # names of those that come
    left: list[Row] = field(default_factory=list)  # what stays there
    # links to elsewhere that would come, with their targets
    skipped: list[str] = field(default_factory=list)


def choose_contents(folder: RunFolder, what: str, *, skip: Collection[str] = ()) -> Contents:
    """Return what comes. `skip` names checkpoints that have turned out to be damaged."""
    found = Contents()
    found.checkpoints = [name for name in _complete_checkpoints(folder) if name not in skip]
    if what != ALL:
        found.checkpoints = found.checkpoints[:1] if what == WEIGHTS else []
    loose_weights = what == WEIGHTS and not found.checkpoints
    for row in _walk(folder.path):
        name, _, _, link = row
        comes = _comes(row, what, found.checkpoints, folder)
        if link and not is_safe_link(name, link):
            if comes and name not in (folder.code.name, folder.run_half.name):
                found.skipped.append(f"{name} -> {link}")
        elif comes or (loose_weights and is_weights_file(name)):
            found.files.append(row)
        else:
            found.left.append(row)
    if what == ALL and folder.code.is_dir():
        found.code = list(_walk(folder.code.resolve(), is_code=True))
    return found


def _comes(row: Row, what: str, checkpoints: Collection[str], folder: RunFolder) -> bool:
    name, size, _, link = row
    top, _, rest = name.partition("/")
    if top == "checkpoints":  # and links to them, such as `latest`
        return rest.split("/")[0] in checkpoints or bool(what == ALL and link and "/" not in rest)
    if what == ALL:
        return True
    is_log = top in LOG_FOLDERS or top.startswith("attempt-")
    if is_log or not rest or top in ("events", "system"):
        return name not in LARGE_FILES
    return size <= SMALL and not (top == "work" and _is_code(row, folder))


def _is_code(row: Row, folder: RunFolder) -> bool:
    """Whether a file of the working directory, `work/<project>/<name>`, is a copy of the code."""
    try:
        known = os.lstat(folder.code / row[0].split("/", 2)[-1])
    except OSError:
        return False
    return [known.st_size, int(known.st_mtime), ""] == row[1:]


def _complete_checkpoints(folder: RunFolder) -> Iterator[str]:
    """Yield the checkpoints that have a marker, newest first."""
    for path in list_checkpoints(folder.checkpoints):
        try:
            read_marker(path)
        except CheckpointError:
            continue
        yield path.name


def _walk(root: Path, *, is_code: bool = False) -> Iterator[Row]:
    """Yield the files and links of a run, or of its code, which is the user's whatever its names."""
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != REPOSITORY)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            path = os.path.join(parent, name)
            is_temporary = name.startswith(".") and name.endswith((".partial", ".reserved"))
            if (name in SECRETS and not is_code) or is_temporary or name == REPOSITORY:
                continue
            try:
                status = os.lstat(path)
                link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
            except OSError:  # it has just gone
                continue
            if link or stat.S_ISREG(status.st_mode):
                size = 0 if link else status.st_size
                yield [os.path.relpath(path, root), size, int(status.st_mtime), link]


# -- here: bring it


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
    folder, path = RunFolder(made.folder), made.folder
    is_fetched = folder.fetched.is_file() or folder.arrivals.is_dir()
    if not is_fetched and path.exists() and any(path.iterdir()):
        raise UsageError(
            f"{path} already exists and was not created by `paceline fetch`.",
            hint="Choose another folder with --to FOLDER.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    folder.arrivals.mkdir(mode=0o700, exist_ok=True)
    for _ in range(TRIES):
        damaged = _bring(connection, made, overwrite=overwrite, progress=progress)
        if not damaged:
            break
        made.notes += [f"{name} was left out: {why}" for name, why in damaged.items()]
        skip += damaged
        connection, made.listing = ask(skip)
    shutil.rmtree(folder.arrivals, ignore_errors=True)
    return made


def _bring(
    connection: Connection, made: Fetched, *, overwrite: bool, progress: bool
) -> dict[str, str]:
    """Bring what is listed. Return the checkpoints that are not intact there, with the reasons."""
    folder, listing = RunFolder(made.folder), made.listing
    files = {**_versions(listing["files"]), **_versions(listing["code"], "code/")}
    waiting = [name for name, known in files.items() if _version(made.folder / name) != known]
    changed = _changed(folder).difference(waiting if overwrite else {*files} - {*waiting})
    made.notes += [f"{name} {KEPT}" for name in waiting if name in changed]
    waiting = [name for name in waiting if name not in changed]
    there, rsync = str(listing["folder"]), str(listing["rsync"])

    def pull(here: Path, there: str, names: list[str]) -> None:
        if names:
            here.mkdir(exist_ok=True)
            Route(connection, here, there, rsync).pull(names, progress=progress)

    checkpoints = {step: [*_inside(files, step)] for step in listing["checkpoints"]}
    staged = {name for names in checkpoints.values() for name in names}
    code = [name for name in waiting if name.startswith("code/")]
    damaged: dict[str, str] = {}
    try:
        pull(made.folder, there, [name for name in waiting if name not in {*staged, *code}])
        pull(made.folder / "code", f"{there}/code/", [name[len("code/") :] for name in code])
        for step, names in checkpoints.items():
            if not set(names).isdisjoint(waiting):
                pull(folder.arrivals, there, names)
                damaged |= _accept(folder, step)
    finally:
        _record(folder, listing, connection.cluster.name, files, changed)
    come = [name for name in waiting if _version(made.folder / name) is not None]
    made.files += len(come)
    made.size += sum(files[name][0] for name in come if len(files[name]) > 1)
    left = {*waiting} - {*come} - {name for step in damaged for name in checkpoints[step]}
    made.missing = dict.fromkeys(sorted(left), GONE)
    made.checkpoints = [name for name in checkpoints if name not in damaged]
    return damaged


def _accept(folder: RunFolder, step: str) -> dict[str, str]:
    """Give a checkpoint that has arrived its name; return what is wrong if it is not intact."""
    arrived, place = folder.arrivals / "checkpoints" / step, folder.checkpoints / step
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


def _changed(folder: RunFolder) -> set[str]:
    """Return the files that were changed here: they are newer than all that was fetched."""
    last = read_fields(folder.fetched, {"newest": NUMBER, "changed": list})
    newest, known = last.get("newest", float("inf")), last.get("changed", ())
    files = {str(each.relative_to(folder.path)): each for each in folder.path.rglob("*")}
    newer = {name for name, each in files.items() if each.lstat().st_mtime > newest}
    return {name for name in newer.union(known) if name in files and files[name].is_file()}


def _record(
    folder: RunFolder,
    listing: Mapping[str, Any],
    cluster: str,
    names: Collection[str],
    changed: Collection[str],
) -> None:
    """Note what is here now, so that the next command finds what was changed here."""
    earlier = read_fields(folder.fetched, {"newest": NUMBER}).get("newest", 0.0)
    here = [folder.path / name for name in names if name not in changed]
    about = {
        "cluster": cluster,
        "folder": listing["folder"],
        "status": listing["status"],
        "time": time.time(),
        "newest": max([earlier, *(os.lstat(each).st_mtime for each in here if each.exists())]),
        "changed": sorted(changed),
    }
    write_atomically(folder.fetched, json.dumps(about, indent=1) + "\n")


def _versions(rows: Sequence[Row], prefix: str = "") -> dict[str, list[Any]]:
    """Return the listed files whose names lead to a place in the run folder, but not to ours."""
    ours = (RunFolder(Path()).fetched.name, RunFolder(Path()).arrivals.name, PARTIAL)
    found = {}
    for name, size, changed, link in rows:
        parts = f"{prefix}{name}".split("/")
        if ".." not in parts and parts[0] and parts[0] not in ours and PARTIAL not in parts:
            found[f"{prefix}{name}"] = [link] if link else [size, changed]
    return found


def _version(path: Path) -> list[Any] | None:
    if path.is_symlink():
        return [os.readlink(path)]
    if not path.exists():
        return None
    status = path.stat()
    return [status.st_size, int(status.st_mtime)]


def _inside(names: Collection[str], step: str) -> Iterator[str]:
    return (name for name in names if name.startswith(f"checkpoints/{step}/"))
