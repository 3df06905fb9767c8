"""The local folder that files arrive in: complete files under their names, and partial files in a separate folder.

A journal says which version of each file is about to get its name, so that the next command sends only what is new, and
finds what has been changed here. A file's size and time show whether it got its name before a command was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from paceline.contract.checkpoint.marker import find_damage, read_marker
from paceline.contract.files.foreign_records import make, read_object, read_objects
from paceline.contract.run_folder import write_atomically
from paceline.errors import CheckpointError, EnvironmentProblem, UsageError
from paceline.ssh.fetch.contents import PARTS, RemoteFile
from paceline.ssh.fetch.safe_path import RECORD, find_obstacle, make_way

LINK = "link:"  # and the target, instead of a checksum
CONTINUED = 1 << 20  # bytes: larger files go on from where they are; smaller ones are sent whole


@dataclass(frozen=True)
class Version:
    """A file as it was fetched."""

    name: str
    size: int
    mtime_ns: int
    sha256: str


class LocalCopy:
    def __init__(self, folder: Path) -> None:
        self.folder, self.parts = folder, folder / PARTS
        self._versions: dict[str, Version] = {}
        self._digests: dict[str, set[str]] = {}
        self._staged: dict[str, Version] = {}  # files of checkpoints that are not complete yet
        self._discarded: set[str] = set()
        self._journal: IO[str] | None = None

    @contextmanager
    def opened(self) -> Iterator[LocalCopy]:
        """Make the folder, and keep other commands away from it meanwhile."""
        is_fetched = (self.folder / RECORD).is_file() or self.parts.is_dir()
        if not is_fetched and self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(
                f"{self.folder} already exists and was not created by `paceline fetch`.",
                hint="Choose another folder with --to FOLDER.",
            )
        with _private(), self._open_journal() as self._journal:
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"Another command is fetching into {self.folder}.",
                    hint="Wait for it, or choose another folder: --to",
                ) from None
            self._read()
            yield self

    def _open_journal(self) -> IO[str]:
        self.parts.mkdir(parents=True, exist_ok=True)
        return open(self.parts / "journal.jsonl", "a", encoding="utf-8")

    def _read(self) -> None:
        try:
            earlier = list(read_object(self.folder / RECORD)["files"])
        except (OSError, ValueError, KeyError, TypeError):
            earlier = []
        for entry in earlier:
            if (version := self._version(entry)) is not None:
                self._keep(version)
        for entry in read_objects(self.parts / "journal.jsonl"):
            if (version := self._version(entry)) is None:
                continue
            if entry.get("staged"):
                self._staged[version.name] = version
                continue
            self._digests.setdefault(version.name, set()).add(version.sha256)
            if _is_placed(self.folder / version.name, version):
                self._versions[version.name] = version

    def _version(self, entry: dict[str, Any]) -> Version | None:
        try:
            version = make(Version, entry)
            self.path(version.name)
        except (ValueError, TypeError, EnvironmentProblem):
            return None
        return version

    # -- what is here ---------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Return where a file goes. Whatever the name says, that is in the folder."""
        parts = name.split("/")
        if (
            not all(parts)
            or parts[0].lower() in (PARTS, RECORD)
            or any(part in (".", "..") or "\0" in part for part in parts)
        ):
            raise EnvironmentProblem(f"{name!r} is not a valid name for a file in a run folder.")
        return self.folder.joinpath(*parts)

    def has(self, file: RemoteFile) -> bool:
        """Whether this version of a file is here."""
        path = self.path(file.name)
        if find_obstacle(self.folder, path) is not None:
            return False
        if file.link is not None:
            return os.path.islink(path) and os.readlink(path) == file.link
        known = self._versions.get(file.name)
        same = known is not None and (known.size, known.mtime_ns) == (file.size, file.mtime_ns)
        return same and os.path.lexists(path) and not (path.is_dir() and not path.is_symlink())

    def has_staged(self, file: RemoteFile) -> bool:
        """Whether a file of a checkpoint has arrived, but not all others of it."""
        known = self._staged.get(file.name)
        same = known is not None and (known.size, known.mtime_ns) == (file.size, file.mtime_ns)
        return same and _size(self._part(file.name)) == file.size

    def changed_here(self, files: Iterable[RemoteFile]) -> list[str]:
        """Return the files that would be overwritten, and are not as they were fetched."""
        changed = [name for file in files for name in self._changes(file.name)]
        return list(dict.fromkeys(changed))

    def forget(self, name: str) -> None:
        """Fetch a file again: it is not as it was fetched."""
        self._versions.pop(name, None)

    def _changes(self, name: str) -> list[str]:
        path = self.path(name)
        path = find_obstacle(self.folder, path) or path
        if path.is_symlink() or not path.is_dir():
            inside = [path]
        else:  # a folder that becomes a file
            found = [(Path(parent), [*folders, *names]) for parent, folders, names in os.walk(path)]
            inside = [parent / each for parent, names in found for each in names]
            inside = [each for each in inside if each.is_symlink() or not each.is_dir()]
        names = [each.relative_to(self.folder).as_posix() for each in inside]
        return [each for each in names if self._is_changed(each)]

    def _is_changed(self, name: str) -> bool:
        path = self.folder / name
        if not os.path.lexists(path):
            return False
        known, digests = self._versions.get(name), self._digests.get(name, set())
        if path.is_symlink():
            return LINK + os.readlink(path) not in digests
        if not digests or not path.is_file():
            return True
        if known is not None and _is_placed(path, known):
            return False
        with open(path, "rb") as file:
            return _checksum(file).hexdigest() not in digests

    # -- what arrives ---------------------------------------------------------------------------------------------

    def _part(self, name: str) -> Path:
        return self.parts / "files" / self.path(name).relative_to(self.folder)

    def offset(self, file: RemoteFile) -> int:
        """Return how much of a file is here already. A log that has grown goes on from its earlier version."""
        part, path = self._part(file.name), self.path(file.name)
        if file.name in self._discarded:
            return 0
        make_way(self.parts, part)
        size = _size(part)
        is_here = (
            path.is_file() and not path.is_symlink() and find_obstacle(self.folder, path) is None
        )
        if (
            size <= 0
            and is_here
            and CONTINUED <= file.size >= _size(path) > 0
            and file.name in self._digests
        ):
            shutil.copyfile(path, part)
            size = _size(part)
        return size if CONTINUED <= size <= file.size else 0

    def open_part(self, name: str, offset: int) -> tuple[IO[bytes], Any]:
        """Open what is here of a file, at its end; return it with the checksum so far."""
        part = self._part(name)
        make_way(self.parts, part)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "r+b")
        file.truncate(offset)
        total = _checksum(file)
        return file, total

    def discard(self, name: str) -> None:
        """Send a file from its beginning next time: what is here is not how it begins."""
        self._part(name).unlink(missing_ok=True)
        self._discarded.add(name)

    def place(self, version: Version, *, executable: bool) -> None:
        """Give a complete file its name and its time."""
        part, path = self._part(version.name), self.path(version.name)
        _finish(part, version, executable=executable)
        self._note(version)
        make_way(self.folder, path)
        os.replace(part, path)
        self._keep(version)

    def place_link(self, file: RemoteFile) -> None:
        assert file.link is not None
        path, part = self.path(file.name), self._part(file.name)
        version = Version(file.name, 0, file.mtime_ns, LINK + file.link)
        self._note(version)
        make_way(self.parts, part)
        make_way(self.folder, path)
        part.unlink(missing_ok=True)
        part.symlink_to(file.link)
        os.replace(part, path)
        self._keep(version)

    def stage(self, version: Version) -> None:
        """Keep a complete file of a checkpoint until the others are there."""
        _finish(self._part(version.name), version, executable=False)
        self._note(version, staged=True)
        self._staged[version.name] = version

    def place_checkpoint(self, name: str, files: Iterable[RemoteFile]) -> str | None:
        """Give a checkpoint its name, if its marker confirms its files; otherwise return what is wrong with it."""
        part, path = self._part(f"checkpoints/{name}"), self.path(f"checkpoints/{name}")
        versions = [self._staged.get(file.name) or self._versions[file.name] for file in files]
        for file in files:
            if not self._part(file.name).exists():  # it is the same as in the version that is here
                make_way(self.parts, self._part(file.name))
                shutil.copy2(self.path(file.name), self._part(file.name))
        _remove_others(part, {str(self._part(file.name)) for file in files})
        try:
            problem = find_damage(part, read_marker(part).files.items())
        except CheckpointError as error:
            problem = error.message.rstrip(".")
        if problem is not None:
            shutil.rmtree(part, ignore_errors=True)
            return problem
        for version in versions:
            self._note(version)
        if (obstacle := find_obstacle(self.folder, path)) is not None:
            obstacle.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            os.rename(path, self.parts / f"replaced-{name}-{os.urandom(4).hex()}")
        os.rename(part, path)
        for version in versions:
            self._keep(version)
        return None

    def _keep(self, version: Version) -> None:
        """Count a version as the one that is here."""
        self._versions[version.name] = version
        self._digests.setdefault(version.name, set()).add(version.sha256)

    def _note(self, version: Version, **more: bool) -> None:
        assert self._journal is not None
        self._journal.write(json.dumps({**asdict(version), **more}) + "\n")
        self._journal.flush()

    def finish(self, about: dict[str, Any]) -> None:
        """Write the record of what was fetched, and remove all parts."""
        names = [
            name
            for name in sorted(self._versions)
            if find_obstacle(self.folder, self.path(name)) is None
        ]
        files = [asdict(self._versions[name]) for name in names]
        write_atomically(
            self.folder / RECORD, json.dumps({**about, "files": files}, indent=1) + "\n"
        )
        shutil.rmtree(self.parts, ignore_errors=True)


@contextmanager
def _private() -> Iterator[None]:
    """What is made here is for its owner alone, as on the cluster."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _is_placed(path: Path, version: Version) -> bool:
    """Whether a file has the size and the time of a version, or a link its target."""
    try:
        if version.sha256.startswith(LINK):
            return path.is_symlink() and LINK + os.readlink(path) == version.sha256
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (
        version.size,
        version.mtime_ns,
    )


def _finish(path: Path, version: Version, *, executable: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # small ones, of which there may be thousands, are soon sent again
        if version.size >= CONTINUED:
            try:
                os.fsync(descriptor)
            except OSError:  # what was read back may not be what is on the disk
                path.unlink(missing_ok=True)
                raise
        if executable:
            os.fchmod(descriptor, os.fstat(descriptor).st_mode | 0o100)
    finally:
        os.close(descriptor)
    os.utime(path, ns=(version.mtime_ns, version.mtime_ns))


def _checksum(file: IO[bytes]) -> Any:
    total = hashlib.sha256()
    while part := file.read(1 << 20):
        total.update(part)
    return total


def _remove_others(folder: Path, wanted: set[str]) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            if (path := os.path.join(parent, name)) not in wanted:
                os.unlink(path)


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return -1
