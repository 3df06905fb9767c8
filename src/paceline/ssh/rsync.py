"""Copy files to and from a login node: with rsync, or with tar where one side has no rsync.

All that is not code goes this way: fetched runs, the copies that views read, and data, without files
that look like secrets. rsync gets only options that also the old one of macOS has.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.errors import ConnectionProblem, EnvironmentProblem, UsageError
from paceline.launch.code_snapshot import is_secret
from paceline.ssh.connection import Connection, word

PARTIAL = ".paceline-partial"  # the folder of files that are not complete, next to where they go
INCOMPLETE = (
    23,
    24,
)  # exit codes of rsync if single files could not be copied, or have disappeared
KEPT = "What has arrived is kept: the same command continues from there."
# how rsync 3.5 says that it writes to no folder that a link outside of the target leads to
REFUSED = ("Too many levels of symbolic links", "Invalid cross-device link")


@dataclass(frozen=True)
class Copied:
    """What a copy has done, or would do."""

    code: int
    output: str = ""
    errors: str = ""

    @property
    def files(self) -> int:
        """How many files and links are new or have changed."""
        return self._number("Number of (?:regular )?files transferred") + self._number(
            "Number of created files.*link"
        )

    @property
    def size(self) -> int:
        """The bytes of these files."""
        return self._number("Total transferred file size")

    @property
    def newer(self) -> list[str]:
        """Files that are newer where they would go, and stay as they are."""
        lines = self.output.splitlines()
        return [line.removesuffix(" is newer") for line in lines if line.endswith(" is newer")]

    def _number(self, what: str) -> int:
        found = re.search(rf"^{what}: ([\d,.]+)", self.output, re.MULTILINE)
        return int(re.sub(r"\D", "", found[1])) if found else 0


@dataclass(frozen=True)
class Route:
    """A folder here and one on the login node. `rsync` is that program there; empty if it lacks one."""

    connection: Connection
    here: Path
    there: str
    rsync: str

    def pull(self, names: Iterable[str], *, append: bool = False, progress: bool = False) -> Copied:
        """Bring files here. With `append`, those that are here already only grow."""
        options = ["--append"] if append else [f"--partial-dir={PARTIAL}"]
        enter = f"cd {word(self.there)} && "
        if not self._has_rsync():
            pack = self.connection.command(f"{enter}exec tar -cf - --no-recursion --null -T -")
            done = _tar(names, pack, ["tar", "-xpf", "-", "-C", str(self.here)])
        else:
            arguments = [*options, *_shown(progress), self.connection.remote("./"), "./"]
            done = self._run(names, arguments, enter, progress)
        return self._check(done, f"of {self.here}")

    def push(
        self,
        names: Iterable[str],
        *,
        dry_run: bool = False,
        follow: bool = False,
        progress: bool = False,
    ) -> Copied:
        """Send files, except those that are newer there. `follow` sends what links lead to."""
        enter = f"mkdir -p {word(self.there)} && cd {word(self.there)} && "
        if not self._has_rsync():
            pack = ["tar", "-chf" if follow else "-cf", "-", "-C", str(self.here)]
            unpack = self.connection.command(f"{enter}exec tar -xpf - --keep-newer-files")
            done = _tar(names, [*pack, "--no-recursion", "--null", "-T", "-"], unpack)
        else:
            options = ["--update", "--keep-dirlinks", f"--partial-dir={PARTIAL}", "--stats"]
            options += ["--copy-links"] if follow else []
            options += ["--dry-run", "-vv"] if dry_run else _shown(progress)
            ends = ["./", self.connection.remote("./")]
            done = self._run(names, [*options, *ends], enter, progress)
        return self._check(done, f"on {self.connection.cluster.name}")

    def _has_rsync(self) -> bool:
        return bool(self.rsync) and shutil.which("rsync") is not None

    def _run(
        self, names: Iterable[str], arguments: list[str], enter: str, progress: bool
    ) -> Copied:
        """Run rsync. Folders are entered by the shells, so no version of rsync has to quote them."""
        always = ["--links", "--safe-links", "--perms", "--times", "--from0", "--files-from=-"]
        path = f"--rsync-path={enter}{word(self.rsync)}"
        with _listed(names) as source:
            process = subprocess.Popen(
                self.connection.rsync(*always, path, *arguments),
                cwd=self.here,
                stdin=source,
                stdout=None if progress else subprocess.PIPE,
                stderr=subprocess.PIPE,
                umask=0o077,
            )
            try:
                output, errors = process.communicate()
            except BaseException:
                process.terminate()  # it moves what has arrived of a file to PARTIAL
                process.wait()
                raise
        return Copied(process.returncode, os.fsdecode(output or b""), os.fsdecode(errors))

    def _check(self, done: Copied, where: str) -> Copied:
        """Raise an error for a copy that failed. Single files may be missing: `code` tells."""
        name, errors = self.connection.cluster.name, done.errors
        if done.code == 0:
            return done
        if "No space left" in errors or "quota" in errors.lower():
            raise EnvironmentProblem(
                f"The disk {where} is full, or your quota there.", hint=f"Make room. {KEPT}"
            )
        if not self.connection.is_open():
            raise ConnectionProblem(
                f"The connection to {name} was lost.", hint=f"Type: paceline login {name}. {KEPT}"
            )
        if "is your shell clean" in errors:
            raise EnvironmentProblem(
                f"The login shell on {name} prints output, which breaks rsync.",
                hint="Change ~/.bashrc there so that it prints only in interactive shells.",
            )
        said = first_line(errors)
        if any(each in errors for each in REFUSED):
            raise EnvironmentProblem(
                f"On {name}, rsync does not follow a link: {said}.",
                hint="Send that folder separately, and set --to to the target of the link.",
            )
        if done.code not in INCOMPLETE:
            raise EnvironmentProblem(f"Files could not be copied: {said}.", hint=KEPT)
        return done


def is_safe_link(name: str, target: str) -> bool:
    """Whether rsync copies a link: it may go up through its own folders, and then only down.

    Newer versions leave out all with `..` but at the beginning.
    """
    parts = target.split("/")
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    is_inside = up <= name.count("/") and ".." not in parts[up:]
    return is_inside and not target.startswith("/") and not target.endswith("/..")


def first_line(errors: str) -> str:
    """Return the first message of rsync, without control characters."""
    lines = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", errors).splitlines()
    return next((line.strip().rstrip(".") for line in lines if line.strip()), "it gave no reason")


def _tar(names: Iterable[str], pack: list[str], unpack: list[str]) -> Copied:
    with _listed(names) as source, tempfile.TemporaryFile() as errors:
        packer = subprocess.Popen(pack, stdin=source, stdout=subprocess.PIPE, stderr=errors)
        done = subprocess.run(unpack, stdin=packer.stdout, stderr=errors, umask=0o077, check=False)
        assert packer.stdout is not None
        packer.stdout.close()
        code = packer.wait()
        errors.seek(0)
        # tar says 1 if a file has changed meanwhile, and 2 if it cannot be read
        failed = done.returncode or (INCOMPLETE[0] if code in (1, 2) else code)
        return Copied(failed, "", os.fsdecode(errors.read()))


def _listed(names: Iterable[str]) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(b"".join(os.fsencode(name) + b"\0" for name in names))
    file.seek(0)
    return file


def _shown(progress: bool) -> list[str]:
    """Return the option to show one line for everything, where rsync here has it."""
    if not progress:
        return []
    done = subprocess.run(["rsync", "--version"], capture_output=True, text=True, check=False)
    is_old = re.search(r"rsync +version (2\.|3\.0)", done.stdout) or "openrsync" in done.stdout
    return [] if is_old else ["--info=progress2"]


# -- data push -------------------------------------------------------------------------------------


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
