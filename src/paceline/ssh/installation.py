"""Paceline in the user's own cache on a cluster: one folder per version and Python, complete or absent.

Nothing else is installed there, and nothing stays running.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.contract.files.size import show_size
from paceline.contract.run_folder import write_atomically
from paceline.errors import ConnectionProblem, EnvironmentProblem
from paceline.ssh.connection import Answer, Connection
from paceline.ssh.paceline_bundle import Target, bundle_name, cache_folder, make_bundle
from paceline.ssh.remote import unpack
from paceline.ssh.request import ABSENT
from paceline.ssh.shell_text import SETUP_END, SETUP_FAILED, explain_setup, setup_text, word, words

OLDEST = (3, 10)
INSTALL_TIMEOUT = 600.0
PYTHONS = (
    "python3.14",
    "python3.13",
    "python3.12",
    "python3.11",
    "python3.10",
    "python3",
    "python",
)
# Printed by every Python from 2.7 on; a broken one fails.
DESCRIBE = (
    "import sys,platform,json;"
    "print(json.dumps([sys.executable,list(sys.version_info[:2]),platform.machine(),sys.platform,"
    "list(platform.libc_ver())]))"
)


@dataclass(frozen=True)
class Installation:
    """Where Paceline is on the login node, and with which Python it runs."""

    python: str
    cache: str
    folder: str
    setup: str | None = None  # commands of the user's that come first

    def command(self, *args: str) -> str:
        """Return shell text that becomes one of Paceline's programs on the other side, or fails with `ABSENT`.

        What `setup` prints comes with `receive`. The commands of requests are not mixed up with it. A request that
        nobody can carry out is removed: there may be secrets in it.
        """
        is_request = args[0] == "run"
        end = f"echo {SETUP_END} >&2\n" if self.setup and not is_request else ""
        undo = f"rm -f {word(f'{self.cache}/{args[1]}')}; " if is_request else ""
        lost = f"paceline: error: Files of Paceline are missing in {self.folder}.\n  Repeat the command:"
        say = (
            f"printf '%s\\n' {word(f'{lost} it installs them again.')} >&2; " if is_request else ""
        )
        # Python would start with a traceback for Ctrl-C; `start` listens to it as soon as it can
        return (
            f"{setup_text(self.setup, quiet=is_request, undo=undo)}{end}"
            f"{self.looks_complete()} && [ -x {word(self.python)} ] || {{ {undo}{say}exit {ABSENT}; }}\ntrap '' INT\n"
            f"exec {word(self.python)} -I {word(self.folder)} {words(args)}\n"
        )

    def looks_complete(self) -> str:
        """Return a condition for the shell: what every command needs is there. It checks the other files itself."""
        names = (unpack.COMPLETE, unpack.MODULES, "__main__.py")
        return " && ".join(f"[ -f {word(f'{self.folder}/{name}')} ]" for name in names)


def recorded_installation(connection: Connection) -> Installation | None:
    """Return where this version is on the login node, by what its probe said earlier; it may be gone."""
    try:
        values = json.loads(_record(connection).read_text(encoding="utf-8"))
        target = Target(values["python"], *map(_fixed, values["target"]))
        cache = str(values["cache"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Installation(
        target.python, cache, f"{cache}/{bundle_name(target)}", connection.cluster.setup
    )


def require_installed(connection: Connection, note: Callable[[str], None]) -> None:
    """Install this version if the login node does not have it, whatever was recorded earlier."""
    found = recorded_installation(connection)
    if found is not None:
        complete = word(f"{found.folder}/{unpack.COMPLETE}")
        setup = setup_text(found.setup, quiet=True)
        if connection.call(f"{setup}[ -f {complete} ] && [ -x {word(found.python)} ]\n").code == 0:
            return
    install(connection, note)


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _record(connection: Connection) -> Path:
    cluster = connection.cluster
    key = hashlib.sha256(
        json.dumps([cluster.host, cluster.python, cluster.setup]).encode()
    ).hexdigest()[:16]
    return cache_folder() / "clusters" / f"{key}.json"


def is_new_output(connection: Connection, said: str) -> bool:
    """Return whether `setup` has printed something that it has not printed for the command before."""
    path = _record(connection).with_suffix(".setup")
    try:
        before = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        before = ""
    if said == before:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, said) if said else path.unlink(missing_ok=True)
    return bool(said)


def install(connection: Connection, note: Callable[[str], None]) -> Installation:
    """Return the installation of this version on the login node. It is made if it is missing."""
    setup = setup_text(connection.cluster.setup)
    target, cache = _probe(connection, setup)
    bundle = make_bundle(target)
    made = Installation(target.python, cache, f"{cache}/{bundle.name}", connection.cluster.setup)
    _record(connection).parent.mkdir(parents=True, exist_ok=True)
    about = [target.version, target.machine, target.system, target.libc]
    write_atomically(
        _record(connection), json.dumps({"python": target.python, "target": about, "cache": cache})
    )
    source = Path(unpack.__file__).read_text(encoding="utf-8")
    if connection.call(f"{made.looks_complete()}\n").code == 0:
        return made
    size = show_size(bundle.path.stat().st_size)
    note(
        f"installing Paceline {paceline.__version__} on {connection.cluster.name}: {size} in {cache}"
    )
    script = f"{setup}exec {word(target.python)} -I -c {word(source)} {words([cache, bundle.name, bundle.digest])}\n"
    answer = connection.call(script, content=bundle.path.read_bytes(), timeout=INSTALL_TIMEOUT)
    if answer.code != 0:
        raise EnvironmentProblem(
            f"Cannot install Paceline on {connection.cluster.name}: {_last_line(answer)}",
            hint=f"Paceline installs into {cache} there; to use another folder, set XDG_CACHE_HOME there.",
        )
    return made


def _probe(connection: Connection, setup: str) -> tuple[Target, str]:
    """Ask the login node for its Pythons and the user's cache."""
    wanted = [connection.cluster.python] if connection.cluster.python else list(PYTHONS)
    answer = connection.call(
        f"{setup}printf '%s\\n' \"${{XDG_CACHE_HOME:-$HOME/.cache}}/paceline\"\n"
        f"for each in {words(wanted)}; do\n"
        f'  case "$each" in "~/"*) each="$HOME/${{each#??}}";; esac\n'
        f'  "$each" -c {word(DESCRIBE)} </dev/null 2>/dev/null && echo\ndone\nexit 0\n'
    )
    if answer.code == SETUP_FAILED:
        raise explain_setup(answer.errors, name=connection.cluster.name)
    lines = answer.output.decode(errors="surrogateescape").splitlines()
    if not lines or not lines[0].startswith("/"):
        raise ConnectionProblem(
            f"{connection.cluster.host} gave no usable answer: {_last_line(answer)}",
            hint=f"Try `ssh {connection.cluster.host} env`: HOME must be set there.",
        )
    found = [target for line in lines[1:] if (target := _read_target(line)) is not None]
    fitting = [target for target in found if target.version >= OLDEST]
    if not fitting:
        raise _no_python(connection, found)
    return fitting[0], lines[0]


def _read_target(line: str) -> Target | None:
    try:
        python, (major, minor), machine, system, (libc, version) = json.loads(line)
        numbers = tuple(int(each) for each in version.split(".")[:2]) if libc == "glibc" else (0, 0)
        return Target(
            str(python),
            (int(major), int(minor)),
            str(machine),
            str(system),
            (numbers[0], numbers[1]),
        )
    except (ValueError, TypeError, IndexError):
        return None


def _no_python(connection: Connection, found: list[Target]) -> EnvironmentProblem:
    name, python = connection.cluster.name, connection.cluster.python
    versions = ", ".join(f"{each.python} ({each.version[0]}.{each.version[1]})" for each in found)
    if python and not found:
        message = f"There is no Python {python!r} on {name}."
    else:
        message = f"Paceline needs Python 3.10 or newer on {name}, and found {versions or 'none'}."
    return EnvironmentProblem(
        message,
        hint=f'Set python = "/path/to/python3.11" in [profiles.{name}], or setup = "module load python" if the site has'
        " newer ones as modules.",
    )


def _last_line(answer: Answer) -> str:
    lines = [line for line in answer.errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {answer.code}"
