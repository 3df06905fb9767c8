"""Paceline in the user's own cache on a cluster: one folder per version, complete or absent.

It is a folder of packages that the login node's own Python runs, and no virtual environment: jobs
without an environment of their own use that Python, too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.errors import EnvironmentProblem
from paceline.spec.clusters import Cluster
from paceline.ssh.connection import Answer, Connection, setup_text, word, words

OLDEST = (3, 10)
INSTALL_TIMEOUT = 600.0
PYTHONS = (
    *("python3.14", "python3.13", "python3.12", "python3.11", "python3.10"),
    *("python3", "python"),
)
# Printed by every Python from 2.7 on; a broken one fails.
DESCRIBE = (
    "import sys,platform,json;"
    "print(json.dumps([sys.executable,list(sys.version_info[:2]),platform.machine(),sys.platform,"
    "list(platform.libc_ver())]))"
)
REQUIREMENTS = ("pydantic>=2.5", "typer>=0.12", "rich>=13", "psutil>=5.9", "typing_extensions")
MAIN = """\
import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from paceline.ssh.far_side import begin

begin()

from paceline.cli import main

main()
"""
CACHE = 'cache="${XDG_CACHE_HOME:-$HOME/.cache}/paceline"\n'
# Becomes a command of Paceline; `locate` comes before it.
RUN = 'exec "$(cat "$here/python")" -I "$here/start.py"\n'
# How many files a folder must have: sites remove files from caches that nobody has used for weeks.
_COUNT = """find "$here" -type f ! -name '*.pyc' ! -name complete | wc -l"""
# What is kept for a month after its last use.
_CLEAN = (
    'find "$cache" "$cache/code" -mindepth 1 -maxdepth 1 ! -name code ! -name work ! -name mirror'
    " -mtime +30 -exec rm -rf {} + 2>/dev/null\n"
)
_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Target:
    """The Python on the other side, as it describes itself."""

    python: str  # its path
    version: tuple[int, int]
    machine: str  # x86_64, aarch64
    system: str  # linux
    libc: tuple[int, int]  # of glibc; (0, 0) for another one

    def fits_here(self) -> bool:
        """Whether packages that are installed here work there as they are."""
        name, version = platform.libc_ver()
        here = (sys.version_info[:2], platform.machine(), sys.platform, name)
        is_same = here == (self.version, self.machine, self.system, "glibc")
        return is_same and self.libc >= _numbers(version)


def locate(cluster: Cluster) -> str:
    """Return shell text that sets `cache` and `here`, the folder of this version on the cluster."""
    return f'{CACHE}here="$cache/{_name(cluster)}"\n'


def is_complete() -> str:
    """Return a condition for the shell: this version is there. Its files are counted once a day."""
    return (
        '{ [ -x "$(cat "$here/python" 2>/dev/null)" ] && [ -f "$here/complete" ] && '
        '{ [ -n "$(find "$here/complete" -mtime -1)" ] || '
        f'[ "$({_COUNT})" = "$(cat "$here/complete")" ] && touch "$here" "$here/complete"; }}; }}'
    )


@functools.cache
def _name(cluster: Cluster) -> str:
    """Return the name of the folder: another one for every change of the code."""
    key = hashlib.sha256(json.dumps([cluster.python, cluster.setup, REQUIREMENTS, MAIN]).encode())
    for name, path in sorted(_own_files().items()):
        key.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return f"paceline-{paceline.__version__}-{key.hexdigest()[:16]}"


def install(connection: Connection) -> None:
    """Install this version on the login node.

    Packages that Paceline needs are this machine's own if they fit, those of the package index that
    the login node reaches, or those that pip downloads here, in this order.
    """
    name, cluster = connection.cluster.name, connection.cluster
    target = _find_python(connection)
    _log.info(f"installing Paceline {paceline.__version__} on {name}")
    partial = f'{locate(cluster)}partial="$here.partial-{secrets.token_hex(4)}"\n'
    fresh = f'{partial}umask 077; mkdir -p "$partial" && tar -xzf - -C "$partial"\n'
    files = _own_files()
    packages = _installed_packages() if target.fits_here() else {}
    _require(connection, connection.send_tar(files | packages, fresh))
    if not packages:
        pip = (
            f"{word(target.python)} -m pip install --quiet --disable-pip-version-check --retries 1"
        )
        options = f'--timeout 10 --no-compile --target "$partial" {words(_requirements(target))}\n'
        script = f"{setup_text(cluster)}{partial}{pip} {options}"
        if connection.call(script, timeout=INSTALL_TIMEOUT).code != 0:
            with tempfile.TemporaryDirectory() as folder:
                _download(target, Path(folder))
                more = f'{partial}tar -xzf - -C "$partial"\n'
                _require(connection, connection.send_tar(_files(Path(folder)), more))
    end = (
        f'{partial}printf %s {word(MAIN)} >"$partial/start.py"\n'
        f'printf %s {word(target.python)} >"$partial/python"\n'
        f'{_COUNT.replace("here", "partial")} >"$partial/complete"\n'
        # A command that was faster may use its folder already: only a damaged one is replaced.
        f'if mv -T "$partial" "$here" 2>/dev/null; then :\n'
        f'elif {is_complete()}; then rm -rf "$partial"\n'
        f'else rm -rf "$here"; mv -T "$partial" "$here" || exit; fi\n{_CLEAN}exit 0\n'
    )
    _require(connection, connection.call(end))


def _require(connection: Connection, answer: Answer) -> None:
    if answer.code != 0:
        raise EnvironmentProblem(
            f"Cannot install Paceline on {connection.cluster.name}: {_last_line(answer)}",
            hint="It goes into ~/.cache/paceline there; for another folder, set XDG_CACHE_HOME there.",
        )


def _last_line(answer: Answer) -> str:
    lines = [line for line in answer.errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {answer.code}"


def _find_python(connection: Connection) -> Target:
    """Ask the login node for its Pythons; return the first that is new enough."""
    cluster = connection.cluster
    wanted = [cluster.python] if cluster.python else list(PYTHONS)
    answer = connection.call(
        f"{setup_text(cluster)}for each in {words(wanted)}; do\n"
        '  case "$each" in "~/"*) each="$HOME/${each#??}";; esac\n'
        f'  "$each" -c {word(DESCRIBE)} </dev/null 2>/dev/null && echo\ndone\nexit 0\n'
    )
    lines = answer.output.decode(errors="surrogateescape").splitlines()
    found = [target for line in lines if (target := _read_target(line)) is not None]
    for target in found:
        if target.version >= OLDEST:
            return target
    versions = ", ".join(f"{each.python} ({each.version[0]}.{each.version[1]})" for each in found)
    if cluster.python and not found:
        message = f"There is no Python {cluster.python!r} on {cluster.name}."
    else:
        message = f"Paceline needs Python 3.10 or newer on {cluster.name}, and found {versions or 'none'}."
    raise EnvironmentProblem(
        message,
        hint=f'Set python = "/path/to/python3.11" in [profiles.{cluster.name}], or setup ='
        ' "module load python" if the site has newer ones as modules.',
    )


def _read_target(line: str) -> Target | None:
    try:
        python, (major, minor), machine, system, (libc, version) = json.loads(line)
        numbers = _numbers(version) if libc == "glibc" else (0, 0)
        return Target(str(python), (int(major), int(minor)), str(machine), str(system), numbers)
    except (ValueError, TypeError):
        return None


def _numbers(version: str) -> tuple[int, int]:
    found = re.findall(r"\d+", version)
    return (int(found[0]), int(found[1])) if len(found) > 1 else (0, 0)


# -- what is sent


@functools.cache
def _own_files() -> dict[str, Path]:
    package = Path(paceline.__file__).parent
    return {f"paceline/{name}": path for name, path in _files(package).items()}


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their names in it, without byte code."""
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in names:
            path = Path(root) / name
            found[path.relative_to(folder).as_posix()] = path
    return found


def _installed_packages() -> dict[str, Path]:
    """Return the files of the packages that this Paceline uses; nothing if some are not found."""
    found = {}
    try:
        for name in _closure():
            files = importlib.metadata.files(name)
            if files is None:
                return {}
            for file in files:
                if ".." not in file.parts and "__pycache__" not in file.parts:  # no scripts
                    found[file.as_posix()] = Path(str(file.locate()))
    except importlib.metadata.PackageNotFoundError:
        return {}
    return found if found and all(map(os.path.isfile, found.values())) else {}


def _closure() -> Iterator[str]:
    """Yield the names of all packages that the requirements need here."""
    waiting, seen = [*map(_package, REQUIREMENTS)], set()
    waiting += ["tomli"] if sys.version_info < (3, 11) else []
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            yield name
            needed = importlib.metadata.requires(name) or ()
            waiting += [_package(each) for each in needed if ";" not in each or _has(each)]


def _package(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def _has(requirement: str) -> bool:
    """Whether a conditional requirement is installed here: if it is, it is wanted."""
    if "extra ==" in requirement:
        return False
    try:
        importlib.metadata.distribution(_package(requirement))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _requirements(target: Target) -> list[str]:
    return [*REQUIREMENTS, *(["tomli>=2"] if target.version < (3, 11) else [])]


def _download(target: Target, folder: Path) -> None:
    """Let pip unpack wheels for the target here. It runs no code of theirs."""
    version = "{}.{}".format(*target.version)
    kinds = [f"cp{version.replace('.', '')}", "abi3", "none"]
    if target.libc == (0, 0):
        platforms = [f"musllinux_1_{minor}_{target.machine}" for minor in (2, 1)]
    else:
        newest = target.libc[1]
        platforms = [f"manylinux_2_{minor}_{target.machine}" for minor in range(newest, 16, -1)]
        platforms.append(f"manylinux2014_{target.machine}")
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    argv += ["--no-compile", "--only-binary=:all:", "--implementation=cp", "--target", str(folder)]
    argv += [f"--python-version={version}", *(f"--abi={each}" for each in kinds)]
    argv += [f"--platform={each}" for each in platforms]
    done = subprocess.run(
        [*argv, *_requirements(target)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentProblem(
            f"Cannot get Paceline's packages for Python {version} on {target.machine}: {said}",
            hint="The login node reaches no package index. Then pip must work here"
            " (`python -m pip --version`) and reach one.",
        )
