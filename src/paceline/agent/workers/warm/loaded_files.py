"""The files that a process has loaded: if one of them changes, its modules are out of date."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator

CUSTOM = ("sitecustomize", "usercustomize")  # imported at the start, if they exist


class LoadedFiles:
    """The state of these files, of the folders of installed packages, and of what could take a
    module's place.
    """

    def __init__(self) -> None:
        self._packages = [*site.getsitepackages(), site.getusersitepackages()]
        self._paths = sorted({*_module_files(), *_mapped_files(), *self._installed()})
        self._names = {name.partition(".")[0] for name in sys.modules} | {*CUSTOM}
        # A folder of the user's may get new files all the time: what counts are names of modules
        # loaded already.
        self._folders = [path for path in sys.path if path not in self._packages]
        self._states = self._read()

    def changed(self) -> str | None:
        """Return the first file or folder that has changed; None if none has."""
        now = self._read()
        return next((path for path in now if now[path] != self._states[path]), None)

    def newest(self) -> tuple[int, str]:
        """Return when the last of the files was changed, in nanoseconds, and its path."""
        return max(
            (state[0], path) for path, state in self._states.items() if isinstance(state, tuple)
        )

    def _installed(self) -> Iterator[str]:
        yield os.path.join(sys.prefix, "pyvenv.cfg")
        for folder in self._packages:
            yield folder
            if os.path.isdir(folder):
                yield from (
                    os.path.join(folder, name)
                    for name in os.listdir(folder)
                    if name.endswith(".pth")
                )

    def _read(self) -> dict[str, tuple[int, int, int] | list[str] | None]:
        return {
            **{path: self._shadows(path) for path in self._folders},
            **{path: _state(path) for path in self._paths},
        }

    def _shadows(self, folder: str) -> list[str]:
        try:
            return sorted(
                name for name in os.listdir(folder) if name.partition(".")[0] in self._names
            )
        except OSError:
            return []


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and os.path.isabs(path):
            yield path


def _mapped_files() -> Iterator[str]:
    """Return the shared libraries, and the interpreter itself."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {
            fields[5].rstrip("\n") for line in maps if len(fields := line.split(maxsplit=5)) == 6
        }
    yield from (
        path for path in paths if path.startswith("/") and not path.startswith(("/dev/", "/memfd:"))
    )
