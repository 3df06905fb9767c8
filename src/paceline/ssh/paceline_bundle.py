"""What is installed on a cluster: this very Paceline and the packages that it needs, for the Python that is there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.errors import EnvironmentProblem
from paceline.ssh.remote import start

FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # equal content gives an equal archive
REQUIREMENTS = ("pydantic>=2.5", "typer>=0.12", "rich>=13", "psutil>=5.9", "typing_extensions")
MAIN = Path(start.__file__).read_bytes()
_SKIPPED = {"__pycache__", "tests", "test"}


@dataclass(frozen=True)
class Target:
    """The Python on the other side, as its probe describes it."""

    python: str  # its path
    version: tuple[int, int]
    machine: str  # x86_64, aarch64
    system: str  # linux
    libc: tuple[int, int]  # of glibc; (0, 0) for another one

    @property
    def tag(self) -> str:
        libc = "{}.{}".format(*self.libc)
        return f"cp{self.version[0]}{self.version[1]}-{self.system}-{self.machine}-{libc}"

    def fits_here(self) -> bool:
        """Whether packages that are installed here work there as they are."""
        name, version = platform.libc_ver()
        here = (sys.version_info[:2], platform.machine(), sys.platform, name)
        if (
            here != (self.version, self.machine, self.system, "glibc")
            or sys.implementation.name != "cpython"
        ):
            return False
        return self.libc >= _numbers(version)


@dataclass(frozen=True)
class Bundle:
    """An archive for a target, and the name of what it is unpacked to."""

    path: Path
    digest: str  # of the archive
    name: str


def cache_folder() -> Path:
    """Return this user's cache on this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "paceline"


def bundle_name(target: Target) -> str:
    """Return the name of what is unpacked from the archive for a target: another one for every change of the code."""
    key = hashlib.sha256(f"{target.tag}\0{','.join(REQUIREMENTS)}\0".encode() + MAIN)
    for name, path in sorted(_sources().items()):
        key.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"{paceline.__version__}-{key.hexdigest()[:16]}"


def make_bundle(target: Target) -> Bundle:
    """Return the archive for a target: from the cache if it is whole there, or made now."""
    store = cache_folder() / "bundles"
    store.mkdir(parents=True, exist_ok=True)
    name, sources = bundle_name(target), _sources()
    archive = store / f"{name}.zip"
    if not _is_whole(archive):
        with _packages(target, store) as folder:
            contents = {
                path.relative_to(folder).as_posix(): path for path in _files(folder)
            } | sources
            _write(archive, contents)
    return Bundle(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), name)


def _sources() -> dict[str, Path]:
    package = Path(paceline.__file__).parent
    return {path.relative_to(package.parent).as_posix(): path for path in _files(package)}


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED)
        yield from (Path(root) / name for name in sorted(names) if not name.endswith(".pyc"))


def _is_whole(archive: Path) -> bool:
    """Whether an archive is there, and can be read to its end. A crash of this machine may have cut it."""
    try:
        with zipfile.ZipFile(archive) as packed:
            return packed.testzip() is None
    except (
        OSError,
        EOFError,
        ValueError,
        NotImplementedError,
        RuntimeError,
        zlib.error,
        zipfile.BadZipFile,
    ):
        return False


def _write(archive: Path, contents: dict[str, Path]) -> None:
    partial = archive.with_name(f".{archive.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out:
            out.writestr(zipfile.ZipInfo("__main__.py", FIXED_DATE), MAIN)
            for name, path in sorted(contents.items()):
                info = zipfile.ZipInfo(name, FIXED_DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                out.writestr(info, path.read_bytes())
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, archive)
    finally:
        partial.unlink(missing_ok=True)


# -- the packages that Paceline needs --------------------------------------------------------------------------


class _packages:
    """A temporary folder with the packages: copied from here where they fit, else downloaded by pip."""

    def __init__(self, target: Target, store: Path) -> None:
        self.target, self.folder = target, Path(tempfile.mkdtemp(prefix=".packages-", dir=store))

    def __enter__(self) -> Path:
        try:
            if not (self.target.fits_here() and _copy_installed(self.folder)):
                _download(self.target, self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self.folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _copy_installed(folder: Path) -> bool:
    """Copy the packages that this Paceline uses; return whether all were found with their files."""
    try:
        names = _closure()
    except importlib.metadata.PackageNotFoundError:
        return False
    for name in names:
        files = importlib.metadata.files(name)
        if files is None:
            return False
        for file in files:
            if ".." in file.parts or file.is_absolute() or "__pycache__" in file.parts:
                continue  # scripts, and byte code
            source, copy = Path(str(file.locate())), folder / file
            if not source.is_file():
                return False
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    return True


def _closure() -> set[str]:
    """Return the names of all packages that the requirements need here."""
    waiting, found = [_name(each) for each in REQUIREMENTS], set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += [
            _name(each)
            for each in importlib.metadata.requires(name) or ()
            if "extra ==" not in each and _applies(each)
        ]
    if sys.version_info < (3, 11):
        found.add("tomli")
    return found


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _applies(requirement: str) -> bool:
    """Whether a conditional requirement is installed here: if it is, it is wanted."""
    if ";" not in requirement:
        return True
    try:
        importlib.metadata.distribution(_name(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _download(target: Target, folder: Path) -> None:
    """Let pip unpack wheels for the target. It runs no code of theirs."""
    version = "{}.{}".format(*target.version)
    requirements = [*REQUIREMENTS, *(["tomli>=2"] if target.version < (3, 11) else [])]
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "install",
        "--no-compile",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        version,
        "--abi",
        f"cp{version.replace('.', '')}",
        "--abi",
        "abi3",
        "--abi",
        "none",
        *_platforms(target),
        "--target",
        str(folder),
        *requirements,
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentProblem(
            f"Cannot get Paceline's packages for Python {version} on {target.machine}: {said}",
            hint="pip must work here (`python -m pip --version`) and reach a package index.",
        )
    shutil.rmtree(folder / "bin", ignore_errors=True)


def _platforms(target: Target) -> list[str]:
    """Return pip's options for a system: all kinds of wheels that its libc can load."""
    if target.libc == (0, 0):
        return [
            "--platform",
            f"musllinux_1_1_{target.machine}",
            "--platform",
            f"musllinux_1_2_{target.machine}",
        ]
    newest = target.libc[1]
    names = [f"manylinux_2_{minor}_{target.machine}" for minor in range(newest, 16, -1)]
    names.append(f"manylinux2014_{target.machine}")
    return [part for name in names for part in ("--platform", name)]


def _numbers(version: str) -> tuple[int, int]:
    found = re.findall(r"\d+", version)
    return (int(found[0]), int(found[1])) if len(found) > 1 else (0, 0)
