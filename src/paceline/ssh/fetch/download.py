"""Fetch a run: ask which files exist, get what is missing here, and retry files that change in transit."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.contract.files.size import show_size
from paceline.errors import EnvironmentProblem, UsageError
from paceline.ssh.fetch.contents import ALL, Contents, RemoteFile
from paceline.ssh.fetch.local_copy import LocalCopy, Version
from paceline.ssh.fetch.remote_files import Arrival, Listing, RemoteFiles
from paceline.ssh.fetch.safe_path import leave_out

# of a file that changes while it is sent, and of a checkpoint that the run removes meanwhile
TRIES = 5
PAUSE = 0.2  # seconds before a file that has changed is sent again
SHOWN = 5
REMOVED = "was removed by the run while it was fetched"
CHANGES = "it changed during every attempt to send it"


class Progress(Protocol):
    def begin(self, total: int) -> None: ...
    def advance(self, size: int, name: str) -> None: ...


@dataclass
class Fetched:
    """What a command has fetched."""

    folder: Path
    listing: Listing
    files: int = 0
    size: int = 0  # bytes that were sent
    checkpoints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # what is there and did not come, with the reasons
    missing: dict[str, str] = field(default_factory=dict)


class Download:
    def __init__(
        self, remote: RemoteFiles, *, what: str, overwrite: bool, cluster: str, progress: Progress
    ) -> None:
        self.remote, self.what, self.overwrite, self.cluster = remote, what, overwrite, cluster
        self.progress = progress

    def run(self, choose_folder: Callable[[Listing], Path]) -> Fetched:
        """Fetch everything, into a folder that is chosen once it is known which run it is."""
        listing = self.remote.list(self.what)
        made = Fetched(choose_folder(listing), listing)
        try:
            with LocalCopy(made.folder).opened() as local:
                self._fetch(local, made)
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                message, advice = f"The disk of {made.folder} is full.", "Make room and"
            elif problem.errno == errno.EIO:
                message, advice = (
                    f"The disk of {made.folder} fails: {problem.strerror}.",
                    "Check the disk, then",
                )
            else:
                raise
            raise EnvironmentProblem(
                message, hint=f"What has arrived is kept. {advice} repeat the command."
            ) from None
        return made

    def _fetch(self, local: LocalCopy, made: Fetched) -> None:
        skip: set[str] = set()
        for _ in range(TRIES):
            contents = made.listing.contents
            contents.files, why = leave_out(contents.files)
            notes = [f"{name} was left out: {reason}" for name, reason in why.items()]
            made.notes += [note for note in notes if note not in made.notes]
            made.missing |= contents.unreadable
            self._compare(local, contents, made)
            waiting = self._missing(local, contents)
            self.progress.begin(sum(file.size - local.offset(file) for file in waiting))
            lost = self._send_all(local, waiting, made)
            wrong = self._place_checkpoints(local, contents, made, skip, lost)
            if not (lost or wrong) or self.what == ALL:
                break
            made.listing = self.remote.list(self.what, skip)
        about = {
            "cluster": self.cluster,
            "folder": made.listing.folder,
            "status": made.listing.status,
            "time": time.time(),
        }
        local.finish(about)

    def _compare(self, local: LocalCopy, contents: Contents, made: Fetched) -> None:
        """Name the files that were changed here, and not there; or restore them."""
        for name in local.changed_here(file for file in contents.files if local.has(file)):
            if self.overwrite:
                local.forget(name)
            elif (
                note := f"{name} was changed here since it was fetched; --overwrite restores it"
            ) not in made.notes:
                made.notes.append(note)

    def _missing(self, local: LocalCopy, contents: Contents) -> list[RemoteFile]:
        """Return the files to send. Raises an error if that overwrites what was changed here, or if they do not fit."""
        missing = [file for file in contents.files if not local.has(file)]
        changed = local.changed_here(missing)
        if changed and not self.overwrite:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            raise UsageError(
                f"Changed in {local.folder} since they were fetched: {', '.join(changed[:SHOWN])}{more}.",
                hint="--overwrite replaces them; --to FOLDER fetches into another folder.",
            )
        missing = [file for file in missing if not local.has_staged(file)]
        needed = sum(file.size - local.offset(file) for file in missing)
        if needed > (free := shutil.disk_usage(local.folder).free):
            raise EnvironmentProblem(
                f"{local.folder} has only {show_size(free)} free, but the run needs {show_size(needed)}.",
                hint="Free some space, or choose another disk with --to FOLDER.",
            )
        return missing

    def _send_all(
        self, local: LocalCopy, waiting: Sequence[RemoteFile], made: Fetched
    ) -> dict[str, str]:
        """Send files until each has arrived as it is; return the checkpoints that did not come, and why."""
        files = {file.name: file for file in waiting if file.link is None}
        for file in waiting:
            if file.link is not None:
                local.place_link(file)
        lost: dict[str, str] = {}
        why: dict[str, str] = {}  # the last try of a file failed
        for count in range(TRIES):
            time.sleep(PAUSE if count else 0)
            why = {}
            for arrival in self.remote.send(
                {name: local.offset(file) for name, file in files.items()}
            ):
                name = arrival.name
                if not arrival.error:
                    if problem := self._receive(local, arrival, files[name], made):
                        why[name] = problem
                elif checkpoint := _checkpoint(name):
                    lost[checkpoint] = (
                        REMOVED if arrival.is_gone else f"cannot be read: {arrival.error}"
                    )
                elif arrival.is_gone:
                    made.notes.append(f"{name} {REMOVED}")
                else:
                    made.missing[name] = arrival.error
            files = {name: files[name] for name in why if _checkpoint(name) not in lost}
            if not files:
                return lost
        for name in files:
            if checkpoint := _checkpoint(name):
                lost[checkpoint] = f"cannot be read: {why[name]}"
            else:
                made.missing[name] = why[name]
        return lost

    def _receive(self, local: LocalCopy, arrival: Arrival, asked: RemoteFile, made: Fetched) -> str:
        """Receive a file; return why it is not whole, or nothing."""
        name, size = arrival.name, arrival.offset
        if arrival.size - max(size, asked.size) > shutil.disk_usage(local.folder).free:
            raise self.remote.nonsense(f"a size of {name} that does not fit")
        file, total = local.open_part(name, arrival.offset)
        with file:
            for part in self.remote.parts():
                size += len(part)
                if size > arrival.size:
                    raise self.remote.nonsense(f"more of {name} than there is")
                file.write(part)
                total.update(part)
                made.size += len(part)
                self.progress.advance(len(part), name)
        end = self.remote.end()
        if end.get("error"):
            return str(end["error"])
        if end.get("changed") or end.get("sha256") != total.hexdigest():
            local.discard(name)
            return CHANGES
        version = Version(name, size, arrival.mtime_ns, total.hexdigest())
        if _checkpoint(name):
            local.stage(version)
        else:
            local.place(version, executable=asked.executable)
        made.files += 1
        made.missing.pop(name, None)
        return ""

    def _place_checkpoints(
        self,
        local: LocalCopy,
        contents: Contents,
        made: Fetched,
        skip: set[str],
        lost: dict[str, str],
    ) -> set[str]:
        """Give the checkpoints their names; return those that have to be replaced by another one."""
        wrong: set[str] = set()
        for name in contents.checkpoints:
            files = [file for file in contents.files if _checkpoint(file.name) == name]
            if name in lost:
                made.notes.append(f"{name} {lost[name]}")
                if lost[name] != REMOVED:
                    skip.add(name)
                    if self.what == ALL:
                        made.missing[f"checkpoints/{name}"] = lost[name]
            elif all(local.has(file) for file in files):
                made.checkpoints.append(name)
            elif problem := local.place_checkpoint(name, files):
                made.notes.append(f"{name} is damaged on {self.cluster}: {problem}")
                skip.add(name)
                wrong.add(name)
            else:
                made.checkpoints.append(name)
        return wrong


def _checkpoint(name: str) -> str:
    """Return the checkpoint that a file belongs to; empty if it belongs to none."""
    parts = name.split("/")
    return parts[1] if parts[0] == "checkpoints" and len(parts) > 2 else ""
