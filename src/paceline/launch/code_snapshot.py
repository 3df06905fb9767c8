"""Snapshots of the project's code, named by their content and shared by all runs with equal code.

Copies are read-only, their owner's alone, and verified before they are used again.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from paceline.contract.files import open_without_waiting, show_size
from paceline.errors import EnvironmentProblem
from paceline.spec.load import SENT_FILE, is_sent, repository_root

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

# Permissions and a digest of the content, by name. A folder has no digest; a link has its target.
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
        """Copy the files into `store`, unless an equal copy is already there.

        A copy is made in a temporary folder and renamed, so that concurrent runs with equal code do
        not collide. It takes the place of one from which a clean-up of old files has removed some.
        """
        store.mkdir(parents=True, exist_ok=True)
        wanted = _read_source(self.folder, self.sizes)
        path = store / _digest(wanted)
        if not _is_intact(path, wanted):
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=store) as temporary:
                partial = Path(temporary, "new")
                _copy(self.folder, wanted, partial)
                path = store / _digest(copied := _read_copy(partial))  # exactly what was copied
                if not _is_intact(path, copied):
                    with suppress(FileNotFoundError):  # usually it is new
                        os.rename(path, f"{temporary}/damaged")
                try:
                    os.rename(partial, path)
                except OSError:  # another command was faster
                    if not path.is_dir():
                        raise
        return Snapshot(path, tuple(self.sizes), sum(self.sizes.values()))


class CodeTooLarge(EnvironmentProblem):
    """The code is more than may be copied."""

    most = ""  # the file or folder that has most of it


# -- which files
# ----------------------------------------------------------------------------------------


def list_code(
    folder: Path, *, limit: int, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> CodeList:
    """List the code in `folder`; raise an error if it is larger than `limit` bytes.

    `exclude_paths` are folders without code, such as run folders inside the project.
    """
    folder = folder.resolve()
    if folder.parent == folder or folder == Path(os.path.expanduser("~")).resolve():
        raise EnvironmentProblem(
            f"{folder} is {'the root folder' if folder.parent == folder else 'your home folder'}, "
            "not a project.",
            hint="Put your script into a folder of its own, and run the command there.",
        )
    names, secrets = find_code(folder, exclude=exclude, exclude_paths=exclude_paths)
    sizes = _measure(folder, names)
    size, count = sum(sizes.values()), len(sizes)
    if size <= limit and count <= MAX_FILES:
        return CodeList(folder, sizes, tuple(secrets))
    parts: Counter[str] = Counter()
    for name, each in sizes.items():
        parts[name.partition("/")[0]] += each if size > limit else 1
    ((most, _),) = parts.most_common(1)
    problem = CodeTooLarge(
        f"The code in {folder} is too large: {show_size(size)} in {count:,} files, at most "
        f"{show_size(limit)} in {MAX_FILES:,} allowed. Most is in {most}.",
        hint=f"If {most} is data, add it to .gitignore or to exclude in [project]. If it is code, "
        "raise snapshot_limit, or pass --no-snapshot.",
    )
    problem.most = most
    raise problem


def find_code(
    folder: Path, *, exclude: Sequence[str] = (), exclude_paths: Iterable[Path] = ()
) -> tuple[list[str], list[str]]:
    """Return the names of the files to copy, sorted; and the secrets that are not copied."""
    folder, patterns = folder.resolve(), tuple(exclude)
    excluded = tuple(f"{path.resolve()}/" for path in exclude_paths)
    names: list[str] = []
    secrets: list[str] = []
    for name in _list(folder):
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


def _list(folder: Path) -> list[str]:
    """Return tracked, changed and new files as git lists them, with those of repositories inside
    this one; outside of repositories, everything but clutter.
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
        said = getattr(problem, "stderr", b"").decode(errors="replace").strip() or problem
        raise EnvironmentProblem(
            f"git cannot list the files of {folder}, so Paceline cannot tell which ones it "
            f"ignores: {said}",
            hint="Try `git status` there, and fix what it reports.",
        ) from None
    names = []
    for name in dict.fromkeys(os.fsdecode(listed).split("\0")):
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            names.append(name)
        elif name and (path / ".git").exists():  # a submodule, or a repository inside this one
            names += [f"{name.rstrip('/')}/{inner}" for inner in _list(path)]
    venvs = [name.removesuffix("pyvenv.cfg") for name in names if name.endswith("/pyvenv.cfg")]
    return [name for name in names if not name.startswith(tuple(venvs))]


def _git(folder: Path, *args: str) -> bytes:
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *args],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=True,
    ).stdout


def _measure(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files and links. Tracked files may be deleted, and pipes are not code;
    nor is the output of this command (`paceline run ... > log.txt`), nor what is behind a link that
    has taken the place of a tracked folder.
    """
    outputs, resolve = [], functools.cache(Path.resolve)
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            outputs.append(os.fstat(descriptor))
    sizes = {}
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            status, parent = os.lstat(folder / name), (folder / name).parent
            is_output = any(os.path.samestat(status, output) for output in outputs)
            if (
                stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFLNK)
                and not is_output
                and resolve(parent) == parent
            ):
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


def _read_source(folder: Path, names: Iterable[str]) -> Contents:
    """Return what a copy of these files has, with the folders that they are in."""
    found: Contents = {"": (0o700, "")}
    for name in names:
        for part in _with_parents(name.split("/")):
            try:
                if part not in found:
                    mode, digest = _read(folder / part)
                    # the copy is its owner's alone, who can enter folders and execute programs
                    own = mode & 0o100 | 0o400 if digest else 0o700
                    found[part] = (own if mode else 0, digest)
            except FileNotFoundError:  # deleted since it was listed
                continue
            except OSError as error:
                raise EnvironmentProblem(
                    f"Cannot copy {folder / part}: {error.strerror}.",
                    hint="Fix its permissions, add it to .gitignore, or pass --no-snapshot.",
                ) from None
    return found


def _read_copy(copy: Path) -> Contents:
    return {name: _read(copy / name) for name in ("", *list_copy(copy))}


def list_copy(copy: Path) -> Iterator[str]:
    """Yield what is in a copy, except the byte code that Python has added since."""
    for root, folders, files in os.walk(copy):
        folders[:] = [name for name in folders if name != BYTECODE]
        for name in (*folders, *files):
            yield os.path.relpath(os.path.join(root, name), copy)


def _read(path: Path) -> tuple[int, str]:
    if path.is_symlink():
        return 0, f"link to {os.readlink(path)}"
    if path.is_dir():
        return path.stat().st_mode & 0o777, ""  # a folder in a shared one may have its setgid bit
    total = hashlib.sha256()
    with open(open_without_waiting(path), "rb", buffering=0) as file:
        while content := file.read(BLOCK):
            total.update(content)
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode), total.hexdigest()


def _copy(folder: Path, wanted: Contents, target: Path) -> None:
    for name in sorted(wanted):
        mode, digest = wanted[name]
        if not digest:
            (target / name).mkdir(mode=mode)
            continue
        with suppress(FileNotFoundError):  # deleted since it was listed
            shutil.copyfile(folder / name, target / name, follow_symlinks=False)
            if not (target / name).is_symlink():
                (target / name).chmod(mode)


# Any file of this name, in any folder and any case.
_FILES = (
    # variables
    ".env",
    ".env.*",
    ".env-*",
    ".env_*",
    "*.env",
    ".envrc",
    ".envrc.*",
    "*.tfvars",
    "*.tfstate",
    "*.tfstate.*",
    # private keys and stores of keys
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.ppk",
    "*.kdb",
    "*.kdbx",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    # logins of programs
    ".netrc",
    "_netrc",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    ".pgpass",
    ".my.cnf",
    ".htpasswd",
    ".s3cfg",
    ".boto",
    ".dockercfg",
    ".dockerconfigjson",
    ".vault-token",
    "kaggle.json",
    "rclone.conf",
    "kubeconfig",
    "kubeconfig.*",
    "*.kubeconfig",
    # whatever says so
    "credentials*",
    "*credentials.json",
    "*[_-]credentials",
    "*[_-]credentials.*",
    "client_secret*.json",
    "*service-account*.json",
    "*service_account*.json",
    "*serviceaccount*.json",
    "secret",
    "secret.*",
    "secrets",
    "secrets.*",
    ".secrets",
    ".secrets.*",
    "token",
    ".token",
    "token.txt",
    "*.token",
    "*_token",
    "*_token.txt",
    "api[_-]key*",
    "apikey*",
    "*[_-]key",
    "*[_-]key.txt",
    "*gcp[_-]key*.json",
    "*google[_-]key*.json",
    "password",
    "passwords",
    "password.*",
    "passwords.*",
    "*[_-]password.txt",
    "*[_-]passwords.txt",
)

# What editors and people append to the name of a copy.
_COPY = re.compile(r"(?:~|\.(?:bak|backup|old|orig|save))+$")

# Everything in folders of this name.
_FOLDERS = (".aws", ".azure", ".gcloud", ".kaggle", ".kube", ".ssh", ".gnupg", ".secrets")

# The same, but for code and documentation: packages have such names too.
_NAMED_FOLDERS = ("secrets",)

# Files by the end of their path.
_PATHS = (
    "*/.docker/config.json",
    "*/.config/gcloud/*",
    "*/gh/hosts.yml",
    "*/wandb/settings",
    "*/.config/containers/auth.json",
)

# Templates, public keys, code and documentation are not secret, whatever they are called.
_HARMLESS = ("example.*", "sample.*", "template.*", ".env.example.*", "answer[_-]key*")
_HARMLESS_ENDS = (
    ".example",
    ".sample",
    ".template",
    ".dist",
    ".pub",
    ".py",
    ".pyi",
    ".ipynb",
    ".sh",
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".h",
    ".md",
    ".rst",
    ".html",
)


def is_secret(path: str) -> bool:
    """Return whether a file, by its path in a project, usually holds secrets."""
    *folders, name = path.lower().split("/")
    if any(folder in _FOLDERS for folder in folders):
        return True
    below = "/".join([*folders[-2:], name])
    if matches(f"/{below}", _PATHS):
        return True
    original = _COPY.sub("", name)
    if original.endswith(_HARMLESS_ENDS):  # first, because most files are code
        return False
    named = any(folder in _NAMED_FOLDERS for folder in folders)
    looks_so = named or any(matches(each, _FILES) for each in {name, original})
    return looks_so and not matches(original, _HARMLESS)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name matches one of these shell patterns."""
    return _expression(patterns).match(name) is not None


@functools.lru_cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


# -- code that was sent here from another machine --------------------------------------------------


@dataclass(frozen=True)
class SentCode:
    """What was sent. `files` maps names to kind, size and digest (of a link: its target)."""

    project: str
    files: dict[str, tuple[str, int, str]]
    commit: str | None = None
    branch: str | None = None
    changed: bool | None = None

    @property
    def digest(self) -> str:
        """Equal for equal files, whatever their commit is."""
        return hashlib.sha256(json.dumps(sorted(self.files.items())).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SentCode:
        values = json.loads(text)
        return cls(
            **{**values, "files": {name: tuple(each) for name, each in values["files"].items()}}
        )


def read_sent_code(folder: Path) -> SentCode | None:
    """Return what was sent as this folder; None if it is any other folder."""
    if not is_sent(folder):
        return None
    found = SentCode.from_json((folder.parent / SENT_FILE).read_text(encoding="utf-8"))
    return found if found.project == folder.name else None
