"""The store of code snapshots: a folder per content, verified before it is used again and repaired
if damaged.

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

from paceline.contract.files.shared_folders import open_without_waiting
from paceline.errors import EnvironmentProblem
from paceline.staging.sparse import copy_data, data_blocks

FILE, PROGRAM, LINK = "file", "program", "link"
BYTECODE = "__pycache__"  # Python adds it to copies


@dataclass(frozen=True)
class CodeFile:
    """What a snapshot keeps of a file."""

    kind: str  # file, program or link
    digest: str


def store_code(folder: Path, names: Iterable[str], store: Path) -> tuple[Path, str]:
    """Copy files of a folder into the store, unless they are there. Return the copy and its
    digest.
    """
    names = list(names)
    files = read_files(folder, names)
    digest = _combine(files)
    path = _path_of(store, digest)
    if path.is_dir():
        _repair(path, folder, files)
    else:
        path, digest = _copy(folder, names, store)
    return path, digest


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
    descriptor = open_without_waiting(path)
    try:
        status = os.fstat(descriptor)
        return CodeFile(
            PROGRAM if status.st_mode & 0o100 else FILE, _digest(descriptor, status.st_size)
        )
    finally:
        os.close(descriptor)


def _digest(descriptor: int, size: int) -> str:
    total = hashlib.sha256(b"%d" % size)
    for offset, content in data_blocks(descriptor, size):
        total.update(b"\0%d\0" % offset)
        total.update(content)
    return total.hexdigest()


def _combine(files: dict[str, CodeFile]) -> str:
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(
            f"{name}\0{files[name].kind}\0{files[name].digest}\0".encode(errors="surrogateescape")
        )
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


# -- copying
# -----------------------------------------------------------------------------------------------


def _copy(folder: Path, names: Iterable[str], store: Path) -> tuple[Path, str]:
    """Copy to a temporary folder, then rename it, so that concurrent runs with equal code do not
    collide.
    """
    store.mkdir(parents=True, exist_ok=True)
    partial = store / f".partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir(mode=0o700)
        for name in names:
            try:
                _copy_file(folder, partial, name)
            except FileNotFoundError:
                continue  # deleted since it was listed
        files = read_files(partial, _names(partial))  # exactly what was copied
        _narrow_folders(partial, folder, files)
        digest = _combine(files)
        path = _path_of(store, digest)
        try:
            os.rename(partial, path)
        except OSError:
            if not path.is_dir():
                raise
        return path, digest
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_file(folder: Path, copy: Path, name: str) -> None:
    source, target = folder / name, copy / name
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = target.with_name(f".{secrets.token_hex(4)}.partial")
    try:
        if source.is_symlink():
            os.symlink(os.readlink(source), partial)
        else:
            try:
                reader = open_without_waiting(source)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise _cannot_copy(source, error) from None
            try:
                _copy_content(reader, partial)
            finally:
                os.close(reader)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _copy_content(reader: int, path: Path) -> None:
    status = os.fstat(reader)
    writer = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        copy_data(reader, writer, status.st_size)
        os.fchmod(writer, _narrow(status, os.fstat(writer)) & 0o555)
    finally:
        os.close(writer)


def _narrow(source: os.stat_result, copy: os.stat_result) -> int:
    """Return the mode of a copy: that of its source. If its group is another one, that group has
    no special rights.
    """
    mode = stat.S_IMODE(source.st_mode) & 0o777
    return mode if source.st_gid == copy.st_gid else mode & 0o707 | (mode & 0o007) << 3


def _narrow_folders(copy: Path, folder: Path, names: Iterable[str]) -> None:
    """Close folders of a copy to those who cannot enter the source's, all folders above it
    included.
    """
    parents = {parent for name in names for parent in Path(name).parents}
    for parent in sorted(parents | {Path()}, key=lambda each: len(each.parts)):
        path = copy / parent
        with suppress(OSError):
            status = path.lstat()
            allowed = _narrow((folder / parent).stat(), status) & 0o755 | 0o700
            if parent == Path():
                allowed &= _reach(folder)
            if stat.S_IMODE(status.st_mode) != allowed:
                path.chmod(allowed)


def _reach(folder: Path) -> int:
    """Return the mode bits of those who can reach a folder: the owner, and others if they can
    enter what it is in.
    """
    mode = 0o777
    for parent in folder.resolve().parents:
        entered = parent.stat().st_mode
        mode &= 0o700 | (0o070 if entered & 0o010 else 0) | (0o007 if entered & 0o001 else 0)
    return mode


# -- verification
# ------------------------------------------------------------------------------------------


def _repair(copy: Path, folder: Path, files: dict[str, CodeFile]) -> None:
    """Make a copy equal to its source again, file by file: jobs may be using it."""
    for name in set(_names(copy)) - files.keys():
        (copy / name).unlink(missing_ok=True)
    for name, expected in files.items():
        if not _is_intact(copy, name, expected, folder):
            for parent in reversed(Path(name).parents[:-1]):
                if (copy / parent).is_symlink() or not (copy / parent).is_dir():
                    (copy / parent).unlink(missing_ok=True)
            if (copy / name).is_dir() and not (copy / name).is_symlink():
                shutil.rmtree(copy / name)
            _copy_file(folder, copy, name)
            if read_file(copy / name) != expected:
                raise EnvironmentProblem(
                    f"{folder / name} changed while it was being copied.",
                    hint="Wait until nothing writes to it.",
                )
    _narrow_folders(copy, folder, files)


def _is_intact(copy: Path, name: str, expected: CodeFile, folder: Path) -> bool:
    """Return whether a file of a copy is what it was, reached through folders alone, and no wider
    than its source.
    """
    path = copy / name
    if any((copy / parent).is_symlink() for parent in Path(name).parents[:-1]):
        return False
    try:
        if read_file(path) != expected:
            return False
        status = path.lstat()
        return expected.kind == LINK or not stat.S_IMODE(status.st_mode) & ~_narrow(
            (folder / name).stat(), status
        )
    except OSError:
        return False


def _names(folder: Path) -> Iterator[str]:
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
