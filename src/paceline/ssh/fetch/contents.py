"""Which part of a run folder to fetch: its records and logs, its newest weights, or everything."""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.contract.checkpoint.marker import list_checkpoints, read_marker
from paceline.contract.checkpoint.names import is_weights_file
from paceline.contract.files.foreign_records import read_object
from paceline.contract.run_folder import RunFolder
from paceline.errors import CheckpointError

RECORDS, LOGS, WEIGHTS, ALL = "records", "logs", "weights", "all"
SMALL = 10 << 20  # bytes: larger results come only if asked for
LOG_FOLDERS = ("claims", "job-starts")  # and attempt-N
RECORD_FOLDERS = (*LOG_FOLDERS, "events", "system")
LOG_FILES = ("run.json", "launch.json", "job", "requeues", "cancelled", "grant", "slurm.log")
LARGE_FILES = ("paceline.zip",)
SECRETS = ("environment.sh",)  # in whatever folder of a run: they never leave the cluster
# in a folder that a run is fetched into: what has not arrived whole
PARTS = RunFolder(Path()).arrivals.name


@dataclass(frozen=True)
class RemoteFile:
    """A file of a run folder, as it was when it was listed. `link` is the target of a link."""

    name: str
    size: int
    mtime_ns: int
    executable: bool = False
    link: str | None = None


@dataclass
class Contents:
    files: list[RemoteFile] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)  # names of those that come
    # what stays there: bytes by name in the run folder
    left: dict[str, int] = field(default_factory=dict)
    # links to elsewhere that would come, with their targets
    skipped: list[str] = field(default_factory=list)
    # files and folders that would come, with the reasons
    unreadable: dict[str, str] = field(default_factory=dict)

    def _leave(self, file: RemoteFile) -> None:
        top, _, rest = file.name.partition("/")
        # each by itself: some may be at home
        name = f"{top}/{rest.split('/')[0]}" if top == "checkpoints" else top
        self.left[name] = self.left.get(name, 0) + file.size


def choose_contents(folder: RunFolder, what: str, *, skip: Collection[str] = ()) -> Contents:
    """Return what comes. `skip` names checkpoints that have turned out to be damaged."""
    found = Contents()
    found.checkpoints = [name for name in _complete_checkpoints(folder) if name not in skip]
    if what != ALL:
        found.checkpoints = found.checkpoints[:1] if what == WEIGHTS else []
    loose_weights = what == WEIGHTS and not found.checkpoints
    unreadable: dict[str, str] = {}
    project = _project(folder)
    for each in _walk(folder.path, unreadable):
        file = _with_relative_link(each, folder)
        if file.link is not None and not _stays_inside(file):
            if _comes(file, what, found.checkpoints, folder) and not _is_made_by_us(
                file, folder, project
            ):
                found.skipped.append(f"{file.name} -> {file.link}")
        elif _comes(file, what, found.checkpoints, folder) or (
            loose_weights and is_weights_file(file.name)
        ):
            found.files.append(file)
        else:
            found._leave(file)
    if what == ALL and folder.code.is_dir():
        found.files += _walk(Path(os.path.realpath(folder.code)), unreadable, "code/")
    found.files.sort(key=_order)
    for name, why in unreadable.items():
        if what == ALL or _comes(RemoteFile(f"{name}/file", 0, 0), what, found.checkpoints, folder):
            found.unreadable[name] = why
    return found


def _comes(file: RemoteFile, what: str, checkpoints: Collection[str], folder: RunFolder) -> bool:
    top, _, rest = file.name.partition("/")
    if top == "checkpoints":  # and links to them, such as `latest`
        return rest.split("/")[0] in checkpoints or (
            what == ALL and file.link is not None and "/" not in rest
        )
    if what == ALL:
        return True
    if what == LOGS:
        return file.name in LOG_FILES or (
            bool(rest) and (top in LOG_FOLDERS or top.startswith("attempt-"))
        )
    if not rest:
        return top not in LARGE_FILES
    if top in RECORD_FOLDERS or top.startswith("attempt-"):
        return True
    return file.size <= SMALL and not (top == "work" and _is_code(file, folder))


def _is_code(file: RemoteFile, folder: RunFolder) -> bool:
    """Whether a file of the working directory, `work/<project>/<name>`, is only a copy of the code."""
    original = folder.code / file.name.split("/", 2)[-1]
    try:
        known = os.lstat(original)
        if file.link is not None or not stat.S_ISREG(known.st_mode) or known.st_size != file.size:
            return False
        return known.st_mtime_ns == file.mtime_ns or filecmp.cmp(
            folder.path / file.name, original, shallow=False
        )
    except OSError:
        return False


def _complete_checkpoints(folder: RunFolder) -> Iterator[str]:
    """Yield the checkpoints that have a marker, newest first."""
    for path in list_checkpoints(folder.checkpoints):
        try:
            read_marker(path)
        except CheckpointError:
            continue
        yield path.name


def _walk(root: Path, unreadable: dict[str, str], prefix: str = "") -> Iterator[RemoteFile]:
    """Yield the files of a run; those of its code have the prefix `code/`, and are the user's whatever their names.

    Adds to `unreadable` what cannot be looked at. What has just been removed does not count.
    """

    def note(problem: OSError) -> None:
        if not isinstance(problem, FileNotFoundError):
            unreadable[prefix + _relative(problem.filename, root)] = problem.strerror or str(
                problem
            )

    for parent, folders, names in os.walk(root, onerror=note):
        folders.sort()
        if parent == str(root) and not prefix:
            folders[:] = [name for name in folders if name != PARTS]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            path = os.path.join(parent, name)
            if (name in SECRETS and not prefix) or _is_temporary(name):
                continue
            try:
                status = os.lstat(path)
                link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else None
            except OSError as problem:
                note(problem)
                continue
            if link is None and not stat.S_ISREG(status.st_mode):
                continue
            executable = bool(status.st_mode & stat.S_IXUSR)
            size = 0 if link else status.st_size
            yield RemoteFile(
                f"{prefix}{_relative(path, root)}", size, status.st_mtime_ns, executable, link
            )


def _relative(path: str, root: Path) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith((".partial", ".reserved"))


def _stays_inside(file: RemoteFile) -> bool:
    assert file.link is not None
    target = os.path.normpath(os.path.join(os.path.dirname(file.name), file.link))
    return not os.path.isabs(file.link) and target.split("/")[0] != ".."


def _with_relative_link(file: RemoteFile, folder: RunFolder) -> RemoteFile:
    """Return a link with an absolute path into its own run folder as a relative one, which also works elsewhere."""
    if file.link is None or not os.path.isabs(file.link) or ".." in file.link.split("/"):
        return file
    target = os.path.normpath(file.link)
    for root in (str(folder.path), os.path.realpath(folder.path)):
        if target == root or target.startswith(f"{root}/"):
            return replace(
                file, link=os.path.relpath(target, f"{root}/{os.path.dirname(file.name)}")
            )
    return file


def _project(folder: RunFolder) -> str:
    """Return the live project that the working directory of a run links to; empty if there is none."""
    try:
        return str(read_object(folder.launch_spec)["work"]["project"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _is_made_by_us(file: RemoteFile, folder: RunFolder, project: str) -> bool:
    """Whether a link to elsewhere is no result: to the code and the run half, or to data in the live project."""
    top = file.name.split("/")[0]
    if file.name in (folder.code.name, folder.run_half.name):
        return True
    if top != folder.work.name or not project:
        return False
    name = os.path.relpath(file.name, f"{top}/{os.path.basename(project)}")
    live = {os.path.normpath(f"{each}/{name}") for each in (project, os.path.realpath(project))}
    return file.link in live or os.path.islink(folder.code / name)


def _order(file: RemoteFile) -> tuple[int, str]:
    """Verdicts come first: what was written before them is then complete. Checkpoints come last."""
    name = file.name
    if name.endswith("/verdict"):
        return 0, name
    return 2 if name.startswith("checkpoints/") else 1, name
