"""Code on the login node: files by their content, and a folder for each state of a project that was sent.

Files that several states have in common are sent and stored once. A folder is complete or absent. A folder that has
lost files (caches may be purged), that somebody has changed, or that a job is using stays as it is: the next command
gets a new folder with the same code. Contents are read before they are used: sizes alone don't tell whether one was
changed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.contract.files.sent_code import FILE, KEPT, SentCode
from paceline.errors import EnvironmentProblem
from paceline.launch.code_store import LINK, PROGRAM, CodeFile, read_file

PARTIAL = ".partial-"
OBJECTS, CODE = "objects", "code"  # folders in the cache


class CodeStore:
    def __init__(self, cache: Path) -> None:
        self.objects, self.projects = cache / OBJECTS, cache / CODE

    def find(self, code: SentCode) -> Path | None:
        """Return a folder with exactly this code in which no job works, if there is one."""
        there = itertools.takewhile(lambda folder: folder.parent.exists(), self._folders(code))
        return next((folder for folder in there if _is_usable(folder, code)), None)

    def missing(self, code: SentCode) -> dict[str, str]:
        """Return the contents that are not here: their keys, and for each one name of a file that has it."""
        found = {key_of(each): (name, each) for name, each in code.files.items() if each[0] != LINK}
        return {
            key: name for key, (name, each) in found.items() if not _holds(self._object(key), each)
        }

    def receive(self, stream: IO[bytes], wanted: dict[str, str]) -> None:
        """Store the wanted contents from a stream in tar format, each only if it is what its key says."""
        waiting = dict(wanted)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is None or member.name not in waiting:
                    raise EnvironmentProblem(f"{member.name!r} was not asked for.")
                self._store(member.name, content, waiting.pop(member.name))
        if waiting:
            raise EnvironmentProblem(f"{len(waiting)} files did not arrive.", hint="Try again.")

    def _store(self, key: str, content: IO[bytes], name: str) -> None:
        path = self._object(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{PARTIAL}{secrets.token_hex(6)}")
        digest, _, kind = key.partition(".")
        try:
            with open(partial, "xb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            partial.chmod(0o500 if kind == PROGRAM else 0o400)
            if read_file(partial) != CodeFile(kind, digest):
                raise EnvironmentProblem(
                    f"{name} changed while it was sent.", hint="Wait until nothing writes to it."
                )
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def build(self, code: SentCode, *, own: bool = False) -> Path:
        """Make a folder of a project, from contents that are all here. No other command gets one of its `own`."""
        partial = self.projects / f"{PARTIAL}{secrets.token_hex(6)}"
        root = partial / code.project
        try:
            root.mkdir(parents=True)
            links = [(name, each[2]) for name, each in code.files.items() if each[0] == LINK]
            for name, each in code.files.items():
                if each[0] != LINK:
                    self._place(self._object(key_of(each)), _inside(root, name))
            for name, target in links:  # last, so that no file is written through one
                _inside(root, name).symlink_to(target)
            (partial / FILE).write_text(code.to_json(), encoding="utf-8")
            return self._name(partial, code, own=own)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _name(self, partial: Path, code: SentCode, *, own: bool) -> Path:
        """Give a complete folder the first name that is free. What has a name is never moved: a job may work in it."""
        folders = (
            iter([self.projects / secrets.token_hex(10) / code.project])
            if own
            else self._folders(code)
        )
        for folder in folders:
            try:
                os.rename(partial, folder.parent)
                return folder
            except OSError:
                if own or not folder.parent.exists():
                    raise
            if _is_usable(folder, code):  # somebody else has made it meanwhile
                return folder
        raise AssertionError("names do not end")

    def _place(self, source: Path, copy: Path) -> None:
        try:
            os.link(source, copy)
        except FileNotFoundError:
            raise EnvironmentProblem(
                f"{copy.name} was removed from the cache meanwhile.", hint="Try again."
            ) from None
        except OSError:  # no hard links here
            shutil.copy(source, copy)

    def _folders(self, code: SentCode) -> Iterator[Path]:
        """Yield where this code may lie, without end."""
        digest = hashlib.sha256(code.to_json().encode(errors="surrogateescape")).hexdigest()[:20]
        for number in itertools.count():
            yield self.projects / (f"{digest}-{number}" if number else digest) / code.project

    def _object(self, key: str) -> Path:
        return self.objects / key[:2] / key


def key_of(file: tuple[str, int, str]) -> str:
    """Return the name of a file's content in the store."""
    return f"{file[2]}.{file[0]}"


def _inside(root: Path, name: str) -> Path:
    """Return where a file goes, with its folder. Whatever the name says, that is below the root."""
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") or "\0" in part for part in parts):
        raise EnvironmentProblem(f"{name!r} is not a valid name for a file in a project.")
    path = root.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _is_usable(folder: Path, code: SentCode) -> bool:
    try:
        is_this = (folder.parent / FILE).read_text(encoding="utf-8") == code.to_json()
    except (OSError, ValueError):
        return False
    return (
        is_this
        and not (folder.parent / KEPT).exists()
        and folder.is_dir()
        and all(_holds(folder / name, each) for name, each in code.files.items())
    )


def _holds(path: Path, file: tuple[str, int, str]) -> bool:
    """Whether a path is a file with this very content, or this very link."""
    kind, size, content = file
    try:
        if kind == LINK:
            return os.readlink(path) == content
        return os.lstat(path).st_size == size and read_file(path) == CodeFile(kind, content)
    except (OSError, EnvironmentProblem):
        return False
