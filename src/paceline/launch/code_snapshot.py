"""Snapshots of the project's code, named by their content and shared by all runs with equal code.

Copies are read-only, verified before they are used again, and nobody may do more with a copy than
with its source.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from paceline.contract.files import open_without_waiting, show_size
from paceline.errors import EnvironmentProblem
from paceline.launch.secret_files import is_secret, matches
from paceline.spec.load import read_sent_code, repository_root

MAX_FILES = 20_000
BYTECODE = "__pycache__"  # Python adds it to copies
BLOCK = 1 << 20  # bytes that are read at once
GIT_FAILURES = (OSError, subprocess.CalledProcessError)

# Not copied from a project without git.
CLUTTER = (
    ".git",
    ".hg",
    ".svn",
    BYTECODE,
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

# Permissions and a digest of the content, by name. A folder has no digest; a link has only that of
# its target.
Contents = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Snapshot:
    path: Path
    names: tuple[str, ...]  # of its files
    size: int  # bytes


@dataclass(frozen=True)
class CodeList:
    """The files of a project to copy."""

    folder: Path
    sizes: dict[str, int]  # by name
    skipped_secrets: tuple[str, ...]

    def store(self, store: Path) -> Snapshot:
        """Copy the files into `store`, unless an equal copy is already there."""
        path = _store(self.folder, self.sizes, store)
        return Snapshot(path, tuple(self.sizes), sum(self.sizes.values()))


class CodeTooLarge(EnvironmentProblem):
    """The code is more than may be copied."""

    largest: Sequence[str] = ()  # files; or the folder that has most of them, if they are too many
    is_count: bool = False  # whether they are too many


# -- which files
# ----------------------------------------------------------------------------------------


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
    `travels` to another machine, it is also an error if git cannot say which files it ignores.
    """
    folder = folder.resolve()
    if folder.parent == folder or folder == Path(os.path.expanduser("~")).resolve():
        raise EnvironmentProblem(
            f"{folder} is {'the root folder' if folder.parent == folder else 'your home folder'}, "
            "not a project.",
            hint="Put your script into a folder of its own, and run the command there.",
        )
    names, secrets = find_code(
        folder, exclude=exclude, exclude_paths=exclude_paths, travels=travels
    )
    sizes = _measure(folder, names)
    size, count = sum(sizes.values()), len(sizes)
    if count > MAX_FILES:
        folders = Counter(name.partition("/")[0] for name in names if "/" in name)
        amount, least = f"more than {MAX_FILES:,} files", "Most are in"
        largest = [name for name, _ in folders.most_common(1)]
        listed = ", ".join(largest)
    elif size > limit:
        amount, least = f"{show_size(size)}, at most {show_size(limit)} allowed", "The largest:"
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listed = ", ".join(f"{name} ({show_size(sizes[name])})" for name in largest)
    else:
        return CodeList(folder, sizes, tuple(secrets))
    problem = CodeTooLarge(
        f"The code in {folder} is too large: {amount}. {least} {listed}.",
        hint="Add data to .gitignore or to exclude in [project], raise snapshot_limit, or pass "
        "--no-snapshot.",
    )
    problem.largest, problem.is_count = largest, count > MAX_FILES
    raise problem


def find_code(
    folder: Path,
    *,
    exclude: Sequence[str] = (),
    exclude_paths: Iterable[Path] = (),
    travels: bool = False,
) -> tuple[list[str], list[str]]:
    """Return the names of the files to copy, sorted; and the secrets that are not copied."""
    folder, patterns = folder.resolve(), tuple(exclude)
    excluded = tuple(f"{path.resolve()}/" for path in exclude_paths)
    names: list[str] = []
    secrets: list[str] = []
    for name in _list(folder, travels=travels):
        parts = name.split("/")
        if BYTECODE in parts or f"{folder}/{name}/".startswith(excluded):
            continue
        if is_secret(name):
            secrets.append(name)
        elif not any(matches(each, patterns) for each in (*parts, *_with_parents(parts))):
            names.append(name)
    return sorted(names), secrets


def _with_parents(parts: Sequence[str]) -> Iterator[str]:
    """Yield the folders that a path is in, from the top, and the path itself."""
    return accumulate(parts, "{}/{}".format)


def _list(folder: Path, *, travels: bool) -> list[str]:
    """Return tracked, changed and new files as git lists them, with those of repositories inside
    this one; without git, everything but clutter.
    """
    sent = read_sent_code(folder)
    if sent is not None:  # listed where it came from
        return list(sent.files)
    rules = ["ls-files", "-z", "--others", "--exclude-standard"]
    try:
        if repository_root(folder) is not None:
            listed = _git(folder, *rules, "--cached")
        else:  # as in a new repository, so that .gitignore counts
            rules += [f"--exclude={pattern}" for pattern in CLUTTER]
            with tempfile.TemporaryDirectory(prefix="paceline-git-") as place:
                _git(folder, "init", "--quiet", "--bare", "--template=", place)
                listed = _git(folder, f"--git-dir={place}", f"--work-tree={folder}", *rules)
    except GIT_FAILURES as problem:
        names = list(_walk(folder))
        has_rules = any(os.path.basename(name) == ".gitignore" for name in names)
        if travels and (has_rules or repository_root(folder) is not None):
            said = getattr(problem, "stderr", b"").decode(errors="replace").strip() or problem
            raise EnvironmentProblem(
                f"git cannot list the files of {folder}, so Paceline cannot tell which ones it "
                f"ignores: {said}",
                hint="Nothing was sent. Try `git status` there, and fix what it reports.",
            ) from None
        return names
    names = []
    for name in dict.fromkeys(os.fsdecode(listed).split("\0")):
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            names.append(name)
        elif name and (path / ".git").exists():  # a submodule, or a repository inside this one
            names += [f"{name.rstrip('/')}/{inner}" for inner in _list(path, travels=travels)]
    venvs = [name.removesuffix("pyvenv.cfg") for name in names if name.endswith("/pyvenv.cfg")]
    return [name for name in names if not name.startswith(tuple(venvs))]


def _git(folder: Path, *args: str) -> bytes:
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *args],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=True,
    ).stdout


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
                yield os.path.relpath(os.path.join(root, name), folder)


def _measure(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files and links. Tracked files may be deleted, and pipes are not code;
    nor is the output of this command (`paceline run ... > log.txt`).
    """
    outputs = []
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            outputs.append(os.fstat(descriptor))
    sizes = {}
    for name in names:
        with suppress(FileNotFoundError):
            status = os.lstat(folder / name)
            is_output = any(os.path.samestat(status, output) for output in outputs)
            if stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFLNK) and not is_output:
                sizes[name] = status.st_size
    return sizes


@dataclass(frozen=True)
class CodeIdentity:
    commit: str | None = None
    branch: str | None = None
    changed: bool | None = None  # whether the code differs from the commit


def identify_code(folder: Path) -> CodeIdentity:
    """Return the commit, the branch and whether git sees changes; all None without git."""
    sent = read_sent_code(folder)
    if sent is not None:
        return CodeIdentity(sent.commit, sent.branch, sent.changed)
    try:
        text = os.fsdecode(_git(folder, "status", "--porcelain=v2", "--branch", "--", "."))
    except GIT_FAILURES:
        return CodeIdentity()
    lines = text.splitlines()
    about = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit, branch = about["branch.oid"], about["branch.head"]
    if commit == "(initial)":
        return CodeIdentity()
    changed = len(about) < len(lines)
    return CodeIdentity(commit, None if branch == "(detached)" else branch, changed)


# -- the store: a folder per content
# ----------------------------------------------------------------------------------------


def _store(folder: Path, names: Iterable[str], store: Path) -> Path:
    """Copy files of a folder into the store, unless they are there. Return the copy.

    A copy is made in a temporary folder and renamed, so that concurrent runs with equal code do not
    collide. It takes the place of one from which a clean-up of old files has removed some.
    """
    store.mkdir(parents=True, exist_ok=True)
    wanted = _read_source(folder, names, _narrowed(store))
    expected = store / _digest(wanted)
    if _is_intact(expected, wanted):
        return expected
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=store) as temporary:
        partial = Path(temporary, "new")
        _copy(folder, wanted, partial)
        path = store / _digest(_read_copy(partial))  # exactly what was copied
        if path == expected:
            with suppress(FileNotFoundError):  # usually it is new
                os.rename(path, f"{temporary}/damaged")
        try:
            os.rename(partial, path)
        except OSError:  # another command was faster
            if not path.is_dir():
                raise
    return path


def _is_intact(copy: Path, wanted: Contents) -> bool:
    """Return whether a copy has exactly this. Its owner can change it, so another user's is not
    used.
    """
    try:
        return copy.lstat().st_uid == os.geteuid() and _read_copy(copy) == wanted
    except OSError:  # none, or something in it is no file
        return False


def _digest(contents: Contents) -> str:
    """Return the name of a copy. Each user has their own."""
    total = hashlib.sha256(f"{os.geteuid()}\0".encode())
    for name in sorted(contents):
        mode, digest = contents[name]
        total.update(os.fsencode(f"{name}\0{mode}\0{digest}\0"))
    return total.hexdigest()[:20]


def _read_source(
    folder: Path, names: Iterable[str], narrowed: Callable[[os.stat_result], int]
) -> Contents:
    """Return what a copy of these files has, with the folders that they are in."""
    found: Contents = {}
    for name in names:
        for part in ("", *_with_parents(name.split("/"))):
            try:
                if part not in found:
                    found[part] = _read(folder / part, narrowed)
            except FileNotFoundError:  # deleted since it was listed
                continue
            except OSError as error:
                raise EnvironmentProblem(
                    f"Cannot copy {folder / part}: {error.strerror}.",
                    hint="Fix its permissions, add it to .gitignore, or pass --no-snapshot.",
                ) from None
    root, _ = found.setdefault("", (0o700, ""))
    for parent in folder.parents:  # who cannot reach the project cannot reach its copy
        entered = parent.stat().st_mode
        root &= 0o700 | (0o070 if entered & 0o010 else 0) | (0o007 if entered & 0o001 else 0)
    found[""] = (root, "")
    return found


def _read_copy(copy: Path) -> Contents:
    names = ("", *list_copy(copy))
    return {name: _read(copy / name, lambda status: status.st_mode & 0o7777) for name in names}


def list_copy(copy: Path) -> Iterator[str]:
    """Yield what is in a copy, except the byte code that Python has added since."""
    for root, folders, files in os.walk(copy):
        folders[:] = [name for name in folders if name != BYTECODE]
        for name in (*folders, *files):
            yield os.path.relpath(os.path.join(root, name), copy)


def _read(path: Path, mode: Callable[[os.stat_result], int]) -> tuple[int, str]:
    if path.is_symlink():
        return 0, hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    if path.is_dir():
        return mode(path.stat()), ""
    total = hashlib.sha256()
    with open(open_without_waiting(path), "rb", buffering=0) as file:
        while content := file.read(BLOCK):
            total.update(content)
        return mode(os.fstat(file.fileno())), total.hexdigest()


def _narrowed(store: Path) -> Callable[[os.stat_result], int]:
    """Return what gives the permissions of a copy in the store: those of its source, without
    writing.
    """
    status = store.stat()
    group = status.st_gid if status.st_mode & stat.S_ISGID else os.getegid()

    def narrowed(source: os.stat_result) -> int:
        is_folder = stat.S_ISDIR(source.st_mode)
        mode = source.st_mode & (0o755 if is_folder else 0o555)
        if source.st_gid != group:  # the copy's group has no special rights
            mode = mode & 0o707 | (mode & 0o007) << 3
        return mode | (0o700 if is_folder else 0)

    return narrowed


def _copy(folder: Path, wanted: Contents, target: Path) -> None:
    folders = [name for name in sorted(wanted) if not wanted[name][1]]
    for name in folders:
        (target / name).mkdir(mode=0o700)
    for name in wanted.keys() - folders:
        copy = target / name
        with suppress(FileNotFoundError):  # deleted since it was listed
            shutil.copyfile(folder / name, copy, follow_symlinks=False)
            if not copy.is_symlink():
                copy.chmod(wanted[name][0])
    for name in reversed(folders):
        (target / name).chmod(wanted[name][0])
