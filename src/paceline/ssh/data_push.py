"""What `data push` sends: all files of a path except those that look like secrets."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import EnvironmentProblem, UsageError
from paceline.launch.secret_files import is_secret
from paceline.ssh.connection import Connection
from paceline.ssh.rsync import KEPT, PARTIAL, Copied, Route, first_line, is_safe_link


@dataclass
class SentData:
    path: Path
    is_folder: bool
    name: str  # as it was typed: of a link, that of the link
    names: list[str] = field(default_factory=list)  # of what is sent, in the folder
    size: int = 0  # bytes
    secrets: list[str] = field(default_factory=list)  # left out
    # links that lead out of the folder: left out, too
    outside: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def send(
        self,
        connection: Connection,
        *,
        to: str,
        rsync: str,
        dry_run: bool = False,
        progress: bool = False,
    ) -> Copied:
        """Send it, or say what there is to send to a place that exists.

        If it is interrupted, the next time goes on from there.
        """
        if self.is_folder:
            route = Route(connection, self.path, to, rsync)
            done = route.push(self.names, dry_run=dry_run, progress=progress)
            return self._check(done, dry_run)
        folder, name = os.path.split(to)
        with tempfile.TemporaryDirectory(prefix="paceline-push-") as here:
            Path(here, name).symlink_to(self.path)  # it has another name there
            route = Route(connection, Path(here), folder, rsync)
            done = route.push([name], dry_run=dry_run, follow=True, progress=progress)
            return self._check(done, dry_run)

    def _check(self, done: Copied, dry_run: bool) -> Copied:
        if done.code != 0 and not dry_run:
            raise EnvironmentProblem(
                f"Some files were not sent: {first_line(done.errors)}.", hint=KEPT
            )
        return done


def find_data(path: Path) -> SentData:
    """Return what there is to send. Raises UsageError if there is nothing, or a secret alone."""
    if not path.exists():
        raise UsageError(
            f"There is no file or folder {str(path)!r} here.", hint="Pass the path of your data."
        )
    if is_secret(path.resolve().name) or is_secret(path.name):
        raise UsageError(
            f"{path} looks like a file of secrets, so it is not sent.",
            hint="To pass secrets to runs, see docs/secrets.md.",
        )
    typed, path = path.name, path.resolve()  # of a link, what it leads to is sent
    name = typed if typed not in ("", "..") else path.name
    found = SentData(path, path.is_dir(), name)
    if not found.is_folder:
        found.names, found.size = [name], path.stat().st_size
        return found
    unreadable = found.unreadable
    for parent, folders, names in os.walk(
        path, onerror=lambda problem: unreadable.append(str(problem.filename))
    ):
        links = [each for each in folders if os.path.islink(os.path.join(parent, each))]
        folders[:] = [each for each in folders if each != PARTIAL]
        for each in (*names, *links):
            inside = os.path.relpath(os.path.join(parent, each), path)
            _add(found, os.path.join(parent, each), inside)
    return found


def _add(found: SentData, path: str, name: str) -> None:
    if is_secret(name.replace(os.sep, "/")):
        found.secrets.append(name)
        return
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        kept = found.names if is_safe_link(name, os.readlink(path)) else found.outside
        kept.append(name)
    elif stat.S_ISREG(status.st_mode):
        if not os.access(path, os.R_OK):
            found.unreadable.append(name)
        found.names.append(name)
        found.size += status.st_size
