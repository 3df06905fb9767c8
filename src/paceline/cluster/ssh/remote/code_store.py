"""Code on the login node: files by their content, and a folder for each state of a project that was sent.

Files that several states have in common are sent and stored once. A folder is complete or absent; one that has lost
files, as caches may, is made anew.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tarfile
from pathlib import Path
from typing import IO

from paceline.cluster.runs.snapshot_store import LINK, PROGRAM, CodeFile, read_file
from paceline.contract.files.sent_code import FILE, SentCode
from paceline.errors import EnvironmentProblem

PARTIAL = ".partial-"


class CodeStore:
    def __init__(self, cache: Path) -> None:
        self.objects, self.projects = cache / "objects", cache / "code"

    def find(self, code: SentCode) -> Path | None:
        """Return the folder of this code, if it is there with all its files."""
        folder = self._folder(code)
        return folder if (folder.parent / FILE).is_file() and _is_whole(folder, code) else None

    def missing(self, code: SentCode) -> dict[str, str]:
        """Return the contents that are not here: their keys, and for each one name of a file that has it."""
        keys = {key_of(each): name for name, each in code.files.items() if each[0] != LINK}
        sizes = {key_of(each): each[1] for each in code.files.values()}
        return {key: name for key, name in keys.items() if not _has_size(self._object(key), sizes[key])}

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
                raise EnvironmentProblem(f"{name} changed while it was sent.", hint="Wait until nothing writes to it.")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def build(self, code: SentCode) -> Path:
        """Make the folder of a project, from contents that are all here."""
        folder = self._folder(code)
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
            if folder.parent.exists():  # it has lost files
                os.rename(folder.parent, self.projects / f"{PARTIAL}{secrets.token_hex(6)}")
            try:
                os.rename(partial, folder.parent)
            except OSError:
                if self.find(code) is None:  # somebody else may have made it meanwhile
                    raise
            return folder
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _place(self, source: Path, copy: Path) -> None:
        try:
            os.link(source, copy)
        except OSError:  # no hard links here
            shutil.copy(source, copy)

    def _folder(self, code: SentCode) -> Path:
        total = hashlib.sha256(code.to_json().encode(errors="surrogateescape"))
        return self.projects / total.hexdigest()[:20] / code.project

    def _object(self, key: str) -> Path:
        return self.objects / key[:2] / key


def key_of(file: tuple[str, int, str]) -> str:
    """Return the name of a file's content in the store."""
    return f"{file[2]}.{file[0]}"


def _inside(root: Path, name: str) -> Path:
    """Return where a file goes, with its folder. Whatever the name says, that is below the root."""
    parts = name.split("/")
    if not all(parts) or any(part in (".", "..") or "\0" in part for part in parts):
        raise EnvironmentProblem(f"{name!r} is not a name of a file in a project.")
    path = root.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _is_whole(folder: Path, code: SentCode) -> bool:
    return folder.is_dir() and all(
        os.path.islink(folder / name) if each[0] == LINK else _has_size(folder / name, each[1])
        for name, each in code.files.items()
    )


def _has_size(path: Path, size: int) -> bool:
    try:
        return os.lstat(path).st_size == size
    except OSError:
        return False
