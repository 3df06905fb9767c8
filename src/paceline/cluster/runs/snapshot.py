"""Snapshots of the project's code, named by their content and shared by all runs with equal code."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import EnvironmentProblem

MAX_FILES = 20_000

# Never copied, even if tracked by git: snapshots lie on shared disks.
SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*", "id_ecdsa*", ".netrc", "_netrc",
    ".pypirc", ".npmrc", ".git-credentials", "credentials.json", "secrets.toml", "secrets.y*ml", "secrets.json",
    "secrets.env", "wandb_credentials.txt",
)  # fmt: skip
HARMLESS = ("*.example", "*.sample", "*.template", "*.dist", "*.pub")

# Not copied from a project without git.
CLUTTER = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".hypothesis", ".tox", ".nox", ".ipynb_checkpoints", "*.egg-info", "runs", "wandb", ".DS_Store",
)  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    path: Path
    digest: str
    names: tuple[str, ...]  # of its files
    size: int  # bytes
    skipped_secrets: tuple[str, ...] = ()


def take_snapshot(
    folder: Path, *, store: Path, limit: int, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> Snapshot:
    """Copy the code in `folder` into `store`, unless an equal copy is already there. `limit` is in bytes.

    `exclude_paths` are folders without code, such as run folders inside the project.
    """
    folder = folder.resolve()
    sizes, skipped_secrets = find_code(folder, exclude=exclude, exclude_paths=exclude_paths)
    if sum(sizes.values()) > limit:
        raise _too_large(
            folder, sizes.items(), f"{sum(sizes.values()) / 2**20:,.0f} MB, at most {limit / 2**20:,.0f} allowed"
        )
    digest = _digest(folder, sizes, copy_to=None)
    path = store / digest
    if not path.is_dir():
        digest = _copy(folder, sizes, store)
        path = store / digest
    return Snapshot(path, digest, tuple(sizes), sum(sizes.values()), tuple(skipped_secrets))


def find_code(
    folder: Path, *, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> tuple[dict[str, int], list[str]]:
    """Return the files to copy, sorted, with their sizes; and the secrets that are not copied."""
    folder = folder.resolve()
    excluded = [path.resolve() for path in exclude_paths]
    names: list[str] = []
    skipped_secrets: list[str] = []
    for name in _list(folder):
        base = name.rsplit("/", 1)[-1]
        if _matches(base, SECRETS) and not _matches(base, HARMLESS):
            skipped_secrets.append(name)
        elif not _excluded(name, exclude) and not any(
            folder / name == path or path in (folder / name).parents for path in excluded
        ):
            names.append(name)
        if len(names) > MAX_FILES:
            raise _too_large(folder, [], f"more than {MAX_FILES:,} files")
    names.sort()
    return _measure(folder, names), skipped_secrets


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return _combine(tuple(patterns)).match(name) is not None


@functools.lru_cache
def _combine(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Compile shell patterns into one expression: thousands of names are matched against dozens of them."""
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)")


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a path, or a folder above it, matches."""
    if not patterns:
        return False
    parts = name.split("/")
    return _matches(name, patterns) or any(
        _matches("/".join(parts[: end + 1]), patterns) or _matches(part, patterns) for end, part in enumerate(parts)
    )


def _too_large(folder: Path, sizes: Iterable[tuple[str, int]], amount: str) -> EnvironmentProblem:
    largest = sorted(sizes, key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} ({size / 2**20:,.1f} MB)" for name, size in largest)
    return EnvironmentProblem(
        f"The code in {folder} is too large to copy: {amount}." + (f" The largest: {listed}." if listed else ""),
        hint="Add data to .gitignore or to exclude in [project], raise snapshot_limit, or pass --no-snapshot.",
    )


# -- which files -----------------------------------------------------------------------------------------


def _list(folder: Path) -> Iterator[str]:
    """Yield tracked, changed and new files as git lists them; without git, everything but clutter."""
    listed = _list_by_git(folder)
    return iter(listed) if listed is not None else _walk(folder)


def _list_by_git(folder: Path) -> list[str] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    names = []
    for raw in dict.fromkeys(done.stdout.split(b"\0")):
        name = os.fsdecode(raw).rstrip("/")
        if not name:
            continue
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository inside this one
            names += [f"{name}/{inner}" for inner in _list_by_git(path) or ()]
        else:
            names.append(name)
    return names


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not _matches(name, CLUTTER) and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        ]
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*files, *links):
            if not _matches(name, CLUTTER):
                yield os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")


def _measure(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files and links that exist: tracked files may be deleted, and pipes are not code."""
    sizes = {}
    for name in names:
        try:
            status = os.lstat(folder / name)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            sizes[name] = status.st_size
    return sizes


# -- copying -----------------------------------------------------------------------------------------------


def _digest(folder: Path, names: Iterable[str], *, copy_to: Path | None) -> str:
    """Hash paths, kinds and contents. With `copy_to`, write exactly what was hashed."""
    total = hashlib.sha256()
    for name in names:
        source = folder / name
        try:
            kind, content = read_code(source)
        except FileNotFoundError:
            continue  # deleted since it was listed
        except OSError as error:
            raise EnvironmentProblem(
                f"Cannot copy {source}: {error.strerror}.",
                hint="Fix its permissions, add it to .gitignore, or pass --no-snapshot.",
            ) from None
        label = f"{name}\0{kind}\0{len(content)}\0".encode(errors="surrogateescape")
        total.update(label)
        total.update(content)
        if copy_to is not None:
            _write(copy_to / name, kind, content)
    return total.hexdigest()[:20]


def read_code(path: Path) -> tuple[str, bytes]:
    """Return a file's kind (`file`, `program` or `link`) and its content; for a link, its target."""
    if path.is_symlink():
        return "link", os.fsencode(os.readlink(path))
    with open(path, "rb") as file:
        executable = os.fstat(file.fileno()).st_mode & 0o100
        return ("program" if executable else "file"), file.read()


def _write(path: Path, kind: str, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        os.symlink(os.fsdecode(content), path)
        return
    path.write_bytes(content)
    if kind == "program":
        path.chmod(0o755)


def _copy(folder: Path, names: Iterable[str], store: Path) -> str:
    """Copy to a temporary folder, then rename it, so that concurrent runs with equal code do not collide."""
    store.mkdir(parents=True, exist_ok=True)
    partial = store / f".partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        digest = _digest(folder, names, copy_to=partial)
        try:
            os.rename(partial, store / digest)
        except OSError:
            if not (store / digest).is_dir():
                raise
        return digest
    finally:
        shutil.rmtree(partial, ignore_errors=True)
