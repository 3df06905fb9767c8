"""The working directory of a submitted run: `<run>/work/<project>`, a copy of its snapshot with
links to the rest.

The files of the snapshot are copied, because runs share a snapshot and a script may write to any
file. What the snapshot leaves out, such as data and a venv, is a link to the live project. The head
agent fills the folder before ranks start. Once the run is done, it removes what the script did not
write: thousands of runs must not keep copies.

A link, made here or by the script, may lead to the live project. Nothing here follows such a link:
its target does not belong to the run, and must not be filled, listed or removed.
"""

from __future__ import annotations

import errno
import filecmp
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from paceline.contract.launch_spec import LaunchSpec
from paceline.errors import LaunchError

BYTECODE = "__pycache__"
PARTIAL = ".paceline-partial"  # a copy that is not complete; the next start completes it
THREADS = 8  # network file systems answer slowly, but many requests at once


@dataclass(frozen=True)
class WorkingDirectory:
    path: str
    code: str  # the snapshot
    project: str  # the live folder that was copied
    links: frozenset[str]  # what to link, relative to the project; "../x" lies next to it

    @classmethod
    def of(cls, launch_spec: LaunchSpec) -> WorkingDirectory | None:
        """Return the working directory of a run; None if its ranks work in the live project."""
        work = launch_spec.work
        if not work:
            return None
        return cls(
            launch_spec.source,
            os.path.realpath(work["code"]),
            work["project"],
            frozenset(work["links"]),
        )

    def fill(self, cwd: str) -> None:
        """Add what is missing, and `cwd`. What is there stays: an earlier attempt may have written
        it.
        """
        try:
            self._fill(cwd)
        except OSError as problem:
            is_full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
            raise LaunchError(
                f"Cannot fill the working directory {self.path}: {problem.filename}: "
                f"{problem.strerror}.",
                hint=f"{'Check your quota there' if is_full else 'Check this path'}. With "
                "`--workdir project` or "
                "`--no-snapshot`, runs do not need this folder.",
            ) from None

    def _fill(self, cwd: str) -> None:
        from concurrent.futures import ThreadPoolExecutor  # local runs do without

        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        _make_folder(self.path, _mode(self.code))
        files = []
        for name in self._entries():  # it goes into a folder only after this loop has made it
            if _is_folder(f"{self.code}/{name}"):
                _make_folder(f"{self.path}/{name}", _mode(f"{self.code}/{name}"))
            else:
                files.append(name)
        for parent in self._link_parents():
            if self._is_inside(parent):
                _make_folder(f"{self.path}/{parent}")
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._copy, files))
            list(pool.map(self._link, self._links_inside()))
        os.makedirs(cwd, exist_ok=True)

    def remove_links(self) -> None:
        """Remove the links to the project: who copies a run folder should not get data and secrets
        with it.
        """
        for name in self._links_inside():
            if self._is_link(name):
                os.unlink(self._path(name))
        for parent in reversed(self._link_parents()):
            if self._is_inside(parent) and not os.path.lexists(f"{self.code}/{parent}"):
                with suppress(OSError):
                    os.rmdir(f"{self.path}/{parent}")

    def prune(self) -> None:
        """Remove what the script has not written."""
        self.remove_links()
        for name in reversed(["", *self._entries()]):  # what is in a folder comes before it
            path = self._path(name)
            if _is_folder(path):
                shutil.rmtree(f"{path}/{BYTECODE}", ignore_errors=True)
                with suppress(OSError):
                    os.rmdir(path)
            elif self._is_unchanged(name):
                os.unlink(path)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self.path))

    def _entries(self, parent: str = "") -> Iterator[str]:
        """Yield the snapshot's folders and files, each folder before what is in it.

        Where the working directory has no folder, but a link or a file, what the snapshot has below
        is left out.
        """
        if not _is_folder(self._path(parent)):
            return
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
        partial = f"{target}{PARTIAL}"
        try:
            with suppress(FileNotFoundError):
                os.unlink(partial)
            # its time shows whether a script has written the file again
            shutil.copy2(source, partial)
            os.chmod(partial, os.stat(source).st_mode & 0o777 | 0o200)
            os.rename(partial, target)
        except OSError:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def _link_target(self, name: str) -> str:
        """Return where a link of the snapshot points here: to the copy of a file, or where it did
        in the project.
        """
        text, folder = os.readlink(f"{self.code}/{name}"), os.path.dirname(name)
        if not os.path.isabs(text) and not _leads_out(os.path.normpath(os.path.join(folder, text))):
            return text
        # this is where ".." starts, if the project's own path is a link
        real = os.path.realpath(self.project)
        live = os.path.normpath(os.path.join(real, folder, text))
        for project in (self.project, real):
            inside = os.path.relpath(live, project)
            if not _leads_out(inside) and os.path.lexists(f"{self.code}/{inside}"):
                return os.path.relpath(f"{self.path}/{inside}", f"{self.path}/{folder}")
        return live

    def _link(self, name: str) -> None:
        with suppress(FileExistsError):  # the script has put something in its place
            os.symlink(self._live_path(name), self._path(name))

    def _path(self, name: str) -> str:
        return os.path.normpath(f"{self.path}/{name}")

    def _live_path(self, name: str) -> str:
        return os.path.normpath(
            f"{os.path.realpath(self.project) if _leads_out(name) else self.project}/{name}"
        )

    def _is_inside(self, name: str) -> bool:
        """Return whether only folders lead to a path, and no link of the script's."""
        folders = (
            []
            if _leads_out(name)
            else ["", *(name[: slash.start()] for slash in re.finditer("/", name))]
        )
        return all(map(_is_folder, (os.path.dirname(self.path), *map(self._path, folders))))

    def _links_inside(self) -> list[str]:
        parents = {
            parent for parent in map(os.path.dirname, self.links) if self._is_inside(f"{parent}/x")
        }
        return sorted(name for name in self.links if os.path.dirname(name) in parents)

    def _link_parents(self) -> list[str]:
        """Return the folders that have links, each after the one it is in. The snapshot may lack
        them.
        """
        names = {name[: slash.start()] for name in self.links for slash in re.finditer("/", name)}
        return sorted(names - {".."})

    def _is_link(self, name: str) -> bool:
        path = self._path(name)
        return (
            name in self.links
            and os.path.islink(path)
            and os.readlink(path) == self._live_path(name)
        )

    def _is_unchanged(self, name: str) -> bool:
        source, path = f"{self.code}/{name}", f"{self.path}/{name}"
        if os.path.islink(path) or os.path.islink(source):
            return (
                os.path.islink(path)
                and os.path.islink(source)
                and os.readlink(path) == self._link_target(name)
            )
        try:
            is_old = abs(os.stat(source).st_mtime - os.stat(path).st_mtime) < 1
            return is_old and filecmp.cmp(source, path, shallow=False)
        except OSError:
            return False


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _make_folder(path: str, mode: int = 0o777) -> None:
    with suppress(FileExistsError):  # the script may have put something else in its place
        os.mkdir(path, mode)


def _mode(folder: str) -> int:
    """Return a folder's mode: a copy must not be open to more people."""
    return os.stat(folder).st_mode & 0o777


def _leads_out(relative: str) -> bool:
    return relative.split("/", maxsplit=1)[0] == ".."
