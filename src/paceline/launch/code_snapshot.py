"""Snapshots of the project's code, named by their content and shared by all runs with equal
code.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.files import show_size
from paceline.errors import EnvironmentProblem
from paceline.launch.code_store import BYTECODE, store_code
from paceline.launch.secret_files import is_secret, matches
from paceline.spec.load import repository_root
from paceline.spec.sent_code import read_sent_code

MAX_FILES = 20_000

# Not copied from a project without git.
CLUTTER = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "*.pyc",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".tox",
    ".nox",
    ".ipynb_checkpoints",
    "*.egg-info",
    "runs",
    "wandb",
    ".DS_Store",
)


@dataclass(frozen=True)
class Snapshot:
    path: Path
    digest: str
    names: tuple[str, ...]  # of its files
    size: int  # bytes
    skipped_secrets: tuple[str, ...] = ()
    outside_links: tuple[str, ...] = ()  # relative links that lead out of the project


@dataclass(frozen=True)
class CodeList:
    """The files of a project to copy."""

    folder: Path
    sizes: dict[str, int]  # by name
    skipped_secrets: tuple[str, ...]
    listed: float = 0.0  # when they were listed

    def changed_since(self) -> list[str]:
        """Return the files that have changed since they were listed, or are gone.

        A file that takes the output of this command (`paceline run ... > log.txt`) is not code, and
        is left out.
        """
        changed = [name for name in self.sizes if not _is_older(self.folder / name, self.listed)]
        return [name for name in changed if not takes_output(self.folder / name)]

    def store(self, store: Path) -> Snapshot:
        """Copy the files into `store`, unless an equal copy is already there."""
        path, digest = store_code(self.folder, self.sizes, store)
        outside = tuple(name for name in self.sizes if _leaves(self.folder, name))
        return Snapshot(
            path, digest, tuple(self.sizes), sum(self.sizes.values()), self.skipped_secrets, outside
        )


def _is_older(path: Path, moment: float) -> bool:
    try:
        return path.lstat().st_mtime < moment
    except OSError:
        return False


def takes_output(path: Path) -> bool:
    """Return whether stdout or stderr of this process is that file."""
    for descriptor in (1, 2):
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return True
        except OSError:
            continue
    return False


def list_code(
    folder: Path,
    *,
    limit: int,
    exclude: Sequence[str] = (),
    exclude_paths: Iterable[Path] = (),
    travels: bool = False,
) -> CodeList:
    """List the code in `folder`; raise an error if it is larger than `limit` bytes.

    `exclude_paths` are folders without code, such as run folders inside the project. If the code
    `travels` to another machine, it is also an error if git cannot say which files of a repository
    it ignores.
    """
    now = time.time()
    folder = folder.resolve()
    _require_project(folder)
    sizes, skipped_secrets = find_code(
        folder, exclude=exclude, exclude_paths=exclude_paths, travels=travels
    )
    if sum(sizes.values()) > limit:
        amount = f"{show_size(sum(sizes.values()))}, at most {show_size(limit)} allowed"
        raise _too_large(folder, amount, sizes)
    return CodeList(folder, sizes, tuple(skipped_secrets), now)


def _require_project(folder: Path) -> None:
    if folder.parent == folder or folder == Path(os.path.expanduser("~")).resolve():
        raise EnvironmentProblem(
            f"{folder} is {'the root folder' if folder.parent == folder else 'your home folder'}, "
            "not a project.",
            hint="Put your script into a folder of its own, and run the command there.",
        )


def find_code(
    folder: Path,
    *,
    exclude: Sequence[str] = (),
    exclude_paths: Iterable[Path] = (),
    travels: bool = False,
) -> tuple[dict[str, int], list[str]]:
    """Return the files to copy, sorted, with their sizes; and the secrets that are not copied."""
    folder = folder.resolve()
    excluded = [
        relative
        for path in exclude_paths
        if (relative := _inside(folder, path.resolve())) is not None
    ]
    names: list[str] = []
    skipped_secrets: list[str] = []
    for name in _list(folder, travels=travels):
        if BYTECODE in name.split("/"):
            continue
        if is_secret(name):
            skipped_secrets.append(name)
        elif not _excluded(name, tuple(exclude)) and not any(
            f"{name}/".startswith(path) for path in excluded
        ):
            names.append(name)
        if len(names) > MAX_FILES:
            raise _too_many(folder, names)
    return _measure(folder, sorted(names)), skipped_secrets


def _inside(folder: Path, path: Path) -> str | None:
    """Return how the names of all files in `path` begin, seen from `folder`; None if it is
    elsewhere.
    """
    relative = os.path.relpath(path, folder)
    if relative == os.curdir:
        return ""
    return None if relative.split(os.sep)[0] == os.pardir else f"{relative.replace(os.sep, '/')}/"


def _excluded(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path, or a folder above it, matches."""
    if not patterns:
        return False
    parts = name.split("/")
    return matches(name, patterns) or any(
        matches("/".join(parts[: end + 1]), patterns) or matches(part, patterns)
        for end, part in enumerate(parts)
    )


class CodeTooLarge(EnvironmentProblem):
    """The code is more than may be copied."""

    largest: Sequence[str] = ()  # files; or the folder that has most of them, if they are too many
    is_count: bool = False  # whether they are too many


def _too_large(folder: Path, amount: str, sizes: Mapping[str, int]) -> CodeTooLarge:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{name} ({show_size(sizes[name])})" for name in largest)
    problem = CodeTooLarge(
        f"The code in {folder} is too large: {amount}."
        + (f" The largest: {listed}." if listed else ""),
        hint="Add data to .gitignore or to exclude in [project], raise snapshot_limit, or pass "
        "--no-snapshot.",
    )
    problem.largest = largest
    return problem


def _too_many(folder: Path, names: Iterable[str]) -> CodeTooLarge:
    """Return the error for more files than any limit on their size is about."""
    count = Counter(name.partition("/")[0] for name in names if "/" in name)
    most = [name for name, _ in count.most_common(1)]
    problem = CodeTooLarge(
        f"The code in {folder} has more than {MAX_FILES:,} files."
        + (f" Most are in {most[0]}." if most else ""),
        hint="Add data to .gitignore or to exclude in [project], or pass --no-snapshot.",
    )
    problem.largest, problem.is_count = most, True
    return problem


# -- which files
# -----------------------------------------------------------------------------------------


def _list(folder: Path, *, travels: bool) -> Iterator[str]:
    """Yield tracked, changed and new files as git lists them; without git, everything but
    clutter.
    """
    sent = read_sent_code(folder)
    if sent is not None:  # listed where it came from
        return iter(sent.files)
    try:
        return iter(_list_by_git(folder, travels=travels))
    except _GitProblem as problem:
        if travels and repository_root(folder) is not None:
            raise _unlisted(folder, problem) from None
        return _list_without_repository(folder, travels=travels)


class _GitProblem(Exception):
    """Why git does not list files: there is no repository, it is broken, or there is no git."""


def _unlisted(folder: Path, problem: Exception) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"git cannot list the files of {folder}, so Paceline cannot tell which ones it ignores: "
        f"{problem}",
        hint="Nothing was sent. Try `git status` there, and fix what it reports.",
    )


def _list_by_git(folder: Path, *, travels: bool) -> list[str]:
    listed = _git("-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return _expand(folder, listed, travels=travels)


def _git(*args: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", *args], capture_output=True, stdin=subprocess.DEVNULL, check=False
        )
    except OSError as problem:
        raise _GitProblem(f"git: {problem.strerror}.") from None
    if done.returncode != 0:
        raise _GitProblem(done.stderr.decode(errors="replace").strip())
    return done.stdout


def _expand(folder: Path, listed: bytes, *, travels: bool) -> list[str]:
    """Return the names that git has listed, with the files of repositories inside this folder."""
    names = []
    for raw in dict.fromkeys(listed.split(b"\0")):
        name = os.fsdecode(raw).rstrip("/")
        if not name:
            continue
        path = f"{folder}/{name}"
        if not os.path.isdir(path) or os.path.islink(path):
            names.append(name)
        elif os.path.lexists(f"{path}/.git"):  # a submodule, or a repository inside this one
            names += [f"{name}/{inner}" for inner in _list(Path(path), travels=travels)]
    return names


def _list_without_repository(folder: Path, *, travels: bool) -> Iterator[str]:
    """Yield what git would list in a new repository here, so that `.gitignore` counts; without
    git, all but clutter.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-git-") as place:
            _git("init", "--quiet", "--bare", "--template=", place)
            there = (f"--git-dir={place}", f"--work-tree={folder}", "-C", str(folder))
            clutter = (f"--exclude={pattern}" for pattern in CLUTTER)
            listed = _git(*there, "ls-files", "-z", "--others", "--exclude-standard", *clutter)
    except (_GitProblem, OSError) as problem:
        found = list(_walk(folder))
        if (
            travels
            and shutil.which("git")
            and any(os.path.basename(name) == ".gitignore" for name in found)
        ):
            raise _unlisted(folder, problem) from None
        yield from found
        return
    names = _expand(folder, listed, travels=travels)
    environments = tuple(
        name.removesuffix("pyvenv.cfg") for name in names if name.endswith("/pyvenv.cfg")
    )
    yield from (name for name in names if not name.startswith(environments))


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not matches(name, CLUTTER)
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        ]
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        for name in (*files, *links):
            if not matches(name, CLUTTER):
                yield os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")


def _measure(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files and links that exist: tracked files may be deleted, and pipes are
    not code.
    """
    sizes = {}
    for name in names:
        try:
            status = os.lstat(f"{folder}/{name}")
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            sizes[name] = status.st_size
    return sizes


def _leaves(folder: Path, name: str) -> bool:
    """Return whether a file is a relative link to something outside the folder."""
    path = f"{folder}/{name}"
    if not os.path.islink(path) or os.path.isabs(os.readlink(path)):
        return False
    target = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return target != str(folder) and not target.startswith(f"{folder}/")


@dataclass(frozen=True)
class CodeIdentity:
    commit: str | None = None
    branch: str | None = None
    changed: bool | None = None  # whether the code differs from the commit

    def __str__(self) -> str:
        if self.commit is None:
            return "no commit"
        return f"{self.commit[:10]}{' + changes' if self.changed else ''}"


def identify_code(folder: Path, names: Collection[str] = ()) -> CodeIdentity:
    """Return the commit, the branch and whether the code differs; all None without git.

    `names` are the files that are copied: those that git does not track are changes, too.
    """
    sent = read_sent_code(folder)
    if sent is not None:
        return CodeIdentity(sent.commit, sent.branch, sent.changed)

    def ask(*query: str) -> str | None:
        try:
            return _git("-C", str(folder), *query).decode(errors="surrogateescape").strip()
        except _GitProblem:
            return None

    commit = ask("rev-parse", "--verify", "-q", "HEAD")
    if commit is None:
        return CodeIdentity()
    listed = ask("ls-files", "-z", "--others", "--exclude-standard") or ""
    new = {name for name in listed.split("\0") if name}
    folders = tuple(name for name in new if name.endswith("/"))  # repositories inside this one
    has_new = not new.isdisjoint(names) or any(name.startswith(folders) for name in names)
    differs = ask("diff", "--quiet", "HEAD") is None
    return CodeIdentity(commit, ask("symbolic-ref", "-q", "--short", "HEAD"), differs or has_new)
