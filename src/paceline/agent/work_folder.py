"""The working directory of a submitted run: `<run>/work/<project>`, a copy of its snapshot with links to the rest.

The files of the snapshot are copied, because runs share a snapshot and a script may write to any file. What the
snapshot leaves out, such as data and a venv, is a link to the live project. The head agent fills the folder before
ranks start. Once the run is done, it removes what the script did not write: thousands of runs must not keep copies.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError

BYTECODE = "__pycache__"
THREADS = 8  # network file systems answer slowly, but many requests at once


@dataclass(frozen=True)
class WorkFolder:
    path: str
    code: str  # the snapshot
    project: str  # the live folder that was copied
    links: frozenset[str]  # what to link, relative to the project; "../x" lies next to it

    @classmethod
    def of(cls, launch_spec: LaunchSpec) -> WorkFolder | None:
        """Return the working directory of a run; None if its ranks work in the live project."""
        work = launch_spec.work
        if not work:
            return None
        return cls(launch_spec.source, os.path.realpath(work["code"]), work["project"], frozenset(work["links"]))

    def fill(self, cwd: str) -> None:
        """Add what is missing, and `cwd`. What is there stays: an earlier attempt may have written it."""
        try:
            self._fill(cwd)
        except OSError as problem:
            raise LaunchError(
                f"Cannot fill the working directory {self.path}: {problem.filename}: {problem.strerror}.",
                hint="Check your quota there. `--workdir project` and `--no-snapshot` do without this folder.",
            ) from None

    def _fill(self, cwd: str) -> None:
        from concurrent.futures import ThreadPoolExecutor  # local runs do without

        os.makedirs(self.path, exist_ok=True)
        files = []
        for name in self._entries():
            source = f"{self.code}/{name}"
            if os.path.isdir(source) and not os.path.islink(source):
                with suppress(FileExistsError):  # the script has put a file in its place
                    os.makedirs(f"{self.path}/{name}", exist_ok=True)
            else:
                files.append(name)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._copy, files))
            list(pool.map(self._link, sorted(self.links)))
            list(pool.map(self._share_bytecode, {os.path.dirname(name) for name in files if name.endswith(".py")}))
        os.makedirs(cwd, exist_ok=True)

    def remove_links(self) -> None:
        """Remove the links to the project: who copies a run folder should not get data and secrets with it."""
        for name in self.links:
            if self._is_link(name):
                os.unlink(f"{self.path}/{name}")

    def prune(self) -> None:
        """Remove what the script has not written."""
        self.remove_links()
        for name in reversed(["", *self._entries()]):  # what is in a folder comes before it
            path = f"{self.path}/{name}"
            if os.path.isdir(path) and not os.path.islink(path):
                with suppress(OSError):
                    os.unlink(f"{path}/{BYTECODE}")
                with suppress(OSError):
                    os.rmdir(path)
            elif self._is_unchanged(name):
                os.unlink(path)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self.path))

    def written(self) -> list[str]:
        """Return the files and folders that the script has written here, relative to this folder."""
        return sorted([*self._written(""), *self._written_beside()])

    def _entries(self, parent: str = "") -> Iterator[str]:
        """Yield the snapshot's folders and files, each folder before what is in it, except where a link replaces it."""
        with os.scandir(f"{self.code}/{parent}") as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{parent}{entry.name}"
                if entry.name == BYTECODE or name in self.links:
                    continue
                yield name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._entries(f"{name}/")

    def _copy(self, name: str) -> None:
        source, target = f"{self.code}/{name}", f"{self.path}/{name}"
        if os.path.lexists(target):
            return
        if os.path.islink(source):
            os.symlink(self._link_target(name), target)
            return
        partial = f"{target}.{os.getpid()}.partial"
        try:
            shutil.copyfile(source, partial)
            if os.access(source, os.X_OK):
                shutil.copymode(source, partial)
            # The time shows whether a script has written the file again. Byte code is valid for one time of its source.
            os.utime(partial, ns=(os.stat(source).st_mtime_ns,) * 2)
            os.rename(partial, target)
        except OSError:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def _share_bytecode(self, folder: str) -> None:
        """Keep byte code with the snapshot: a later run need not compile the same files again."""
        shared = os.path.join(self.code, folder, BYTECODE)
        with suppress(OSError):
            os.makedirs(shared, exist_ok=True)
            os.symlink(shared, os.path.join(self.path, folder, BYTECODE))

    def _link_target(self, name: str) -> str:
        """Return where a link of the snapshot points here: as it did in the project, if it leads out of it."""
        text = os.readlink(f"{self.code}/{name}")
        outside = os.path.normpath(os.path.join(os.path.dirname(name), text)).startswith("..")
        return os.path.normpath(os.path.join(self.project, os.path.dirname(name), text)) if outside else text

    def _link(self, name: str) -> None:
        with suppress(FileExistsError, NotADirectoryError):
            os.symlink(self._live_path(name), f"{self.path}/{name}")

    def _live_path(self, name: str) -> str:
        return os.path.normpath(f"{self.project}/{name}")

    def _is_link(self, name: str) -> bool:
        path = f"{self.path}/{name}"
        return os.path.islink(path) and os.readlink(path) == self._live_path(name)

    def _is_unchanged(self, name: str) -> bool:
        source, path = f"{self.code}/{name}", f"{self.path}/{name}"
        if os.path.islink(path) or os.path.islink(source):
            return os.path.islink(path) and os.path.islink(source) and os.readlink(path) == self._link_target(name)
        try:
            is_old = abs(os.stat(source).st_mtime - os.stat(path).st_mtime) < 1
            return is_old and filecmp.cmp(source, path, shallow=False)
        except OSError:
            return False

    def _written(self, parent: str) -> Iterator[str]:
        try:
            entries = list(os.scandir(f"{self.path}/{parent}"))
        except OSError:
            return
        for entry in entries:
            name = f"{parent}{entry.name}"
            if entry.name == BYTECODE or self._is_link(name):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and os.path.isdir(f"{self.code}/{name}"):
                yield from self._written(f"{name}/")
            elif not self._is_unchanged(name):
                yield f"{name}/" if is_folder else name

    def _written_beside(self) -> Iterator[str]:
        """Yield what the script has written next to this folder, as "../x"."""
        try:
            names = os.listdir(os.path.dirname(self.path))
        except OSError:
            return
        for name in names:
            if name != os.path.basename(self.path) and not self._is_link(f"../{name}"):
                yield f"../{name}/" if os.path.isdir(f"{self.path}/../{name}") else f"../{name}"
