"""The store of code snapshots: a folder per content, verified before it is used again.

Copies are read-only, and nobody may do more with a copy than with its source: modes are kept or
narrowed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files import open_without_waiting
from paceline.errors import EnvironmentProblem

FILE, PROGRAM, LINK = "file", "program", "link"
BYTECODE = "__pycache__"  # Python adds it to copies
BLOCK = 1 << 20  # bytes that are read at once


@dataclass(frozen=True)
class CodeFile:
    """What a snapshot keeps of a file."""

    kind: str  # file, program or link
    digest: str


def store_code(folder: Path, names: Iterable[str], store: Path) -> tuple[Path, str]:
    """Copy files of a folder into the store, unless they are there. Return the copy and its
    digest.
    """
    files = read_files(folder, names)
    digest = _combine(files)
    path = _path_of(store, digest)
    if path.is_dir():
        with suppress(EnvironmentProblem):  # something else than a file
            if read_files(path, list_copy(path)) == files:
                _close(path, folder, files)
                return path, digest
        # a clean-up of old files may have removed some; jobs may be using the others meanwhile
        return _copy(folder, files, store, damaged=path)
    return _copy(folder, files, store)


def read_files(folder: Path, names: Iterable[str]) -> dict[str, CodeFile]:
    """Return kinds and digests; files that have been deleted since they were listed are left
    out.
    """
    found = {}
    for name in names:
        try:
            found[name] = read_file(folder / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _cannot_copy(folder / name, error) from None
    return found


def read_file(path: Path) -> CodeFile:
    if path.is_symlink():
        return CodeFile(LINK, hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest())
    total = hashlib.sha256()
    with open(open_without_waiting(path), "rb", buffering=0) as file:
        kind = PROGRAM if os.fstat(file.fileno()).st_mode & 0o100 else FILE
        while content := file.read(BLOCK):
            total.update(content)
    return CodeFile(kind, total.hexdigest())


def _combine(files: dict[str, CodeFile]) -> str:
    total = hashlib.sha256()
    for name in sorted(files):
        line = f"{name}\0{files[name].kind}\0{files[name].digest}\0"
        total.update(line.encode(errors="surrogateescape"))
    return total.hexdigest()[:20]


def _path_of(store: Path, digest: str) -> Path:
    """Return the path of a copy. Whoever owns a copy can change it, so nobody uses another
    user's.
    """
    path = store / digest
    try:
        is_ours = path.lstat().st_uid == os.geteuid()
    except OSError:
        is_ours = True
    return path if is_ours else store / f"{digest}-{os.geteuid()}"


def _copy(
    folder: Path, names: Iterable[str], store: Path, *, damaged: Path | None = None
) -> tuple[Path, str]:
    """Copy to a temporary folder, then rename it, so that concurrent runs with equal code do not
    collide. It takes the place of a damaged copy.
    """
    store.mkdir(parents=True, exist_ok=True)
    partial = store / f".partial-{os.getpid()}-{secrets.token_hex(4)}"
    away = store / f".damaged-{secrets.token_hex(8)}"
    try:
        partial.mkdir(mode=0o700)
        for name in names:
            with suppress(FileNotFoundError):  # deleted since it was listed
                _copy_file(folder / name, partial / name)
        files = read_files(partial, list_copy(partial))  # exactly what was copied
        _close(partial, folder, files)
        digest = _combine(files)
        path = _path_of(store, digest)
        if path == damaged:
            with suppress(FileNotFoundError):  # another command was faster
                os.rename(path, away)
        try:
            os.rename(partial, path)
        except OSError:
            if not path.is_dir():
                raise
        return path, digest
    finally:
        for each in (partial, away):
            shutil.rmtree(each, ignore_errors=True)


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
        return
    try:
        descriptor = open_without_waiting(source)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _cannot_copy(source, error) from None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(descriptor, "rb") as reader:
        mode = 0o600 | os.fstat(reader.fileno()).st_mode & 0o100
        with open(os.open(target, flags, mode), "wb") as writer:
            shutil.copyfileobj(reader, writer)


def _close(copy: Path, folder: Path, names: Iterable[str]) -> None:
    """Close a copy to those who cannot read its source, the folders above it included, and to
    writing.
    """
    names = list(names)
    parents = {parent for name in names for parent in Path(name).parents}
    for relative in sorted(parents | {Path()}, key=lambda each: len(each.parts)):
        _set_mode(copy / relative, folder / relative, 0o755, at_least=0o700)
    for name in names:
        _set_mode(copy / name, folder / name, 0o555)
    reach = stat.S_IMODE(copy.stat().st_mode) & _reach(folder)
    copy.chmod(reach)


def _set_mode(copy: Path, source: Path, most: int, *, at_least: int = 0) -> None:
    with suppress(OSError):
        if copy.is_symlink():
            return
        now, before = copy.stat(), source.stat()
        mode = before.st_mode & most
        if before.st_gid != now.st_gid:  # that group has no special rights
            mode = mode & 0o707 | (mode & 0o007) << 3
        if stat.S_IMODE(now.st_mode) != mode | at_least:
            copy.chmod(mode | at_least)


def _reach(folder: Path) -> int:
    """Return the mode bits of those who can reach a folder: the owner, and others if they can
    enter what it is in.
    """
    mode = 0o777
    for parent in folder.resolve().parents:
        entered = parent.stat().st_mode
        mode &= 0o700 | (0o070 if entered & 0o010 else 0) | (0o007 if entered & 0o001 else 0)
    return mode


def list_copy(folder: Path) -> Iterator[str]:
    """Yield the files and links of a copy, except the byte code that Python has added since."""
    for root, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = [name for name in folders if name != BYTECODE]
        for name in (*files, *links):
            yield os.path.relpath(os.path.join(root, name), folder)


def _cannot_copy(source: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"Cannot copy {source}: {error.strerror}.",
        hint="Fix its permissions, add it to .gitignore, or pass --no-snapshot.",
    )
