"""The mirror: a folder laid out like the scratch folder of a cluster, so that everything that reads runs can read it.

The files themselves tell what it has. Every change is made under a lock and only if it matches what is there, so
several processes may write the same mirror, each from its own stream.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import read_object
from paceline.contract.files.shared_folders import open_own_file
from paceline.contract.run_folder import write_atomically
from paceline.contract.run_path import is_run_path
from paceline.ssh.mirror import frames
from paceline.ssh.mirror.frames import BadStream, Frame
from paceline.ssh.mirror.job_states import keep_states
from paceline.ssh.mirror.run_files import (
    LOG,
    MAX_RECORD,
    RECORD,
    describe_copy,
    is_claim,
    kind_of,
    list_files,
)
from paceline.ssh.mirror.write_lock import write_lock
from paceline.watch.log_file import skipped_bytes, skipped_path

STATE = "heard.json"
REFRESHED = "refreshed.json"
SEEN = "seen.json"  # the same for everything but logs
MAX_FILE = 8 << 30  # bytes
MIN_FREE = 256 << 20  # bytes that stay free on this disk
MAX_TIME = 1e11  # seconds since 1970 that a clock may show
CHECK_INTERVAL = 64 << 20  # bytes that are written between two looks at the free space


@dataclass(frozen=True)
class Heard:
    """When the cluster was last heard of, by its clock and by ours, and where its scratch folder is."""

    scratch: str = ""
    there: float = 0.0
    here: float = 0.0


class Mirror:
    """The mirror of one scratch folder. `apply` may raise BadStream: the stream is then of no use any more."""

    def __init__(self, base: Path) -> None:
        # what is said about the mirror, and the mirror itself
        self.base, self.folder = base, base / "runs"
        self._unchecked = CHECK_INTERVAL
        self._scratch = ""

    def create(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.base, 0o700)
        os.utime(self.base)  # it is used: `clean_mirrors` leaves it alone

    # -- what it has -----------------------------------------------------------------------------------

    def heard(self) -> Heard:
        with suppress(OSError, ValueError, TypeError):
            table = read_object(self.base / STATE)
            return Heard(str(table["scratch"]), float(table["there"]), float(table["here"]))
        return Heard()

    def refreshed(self, path: Path | str) -> float:
        """Return when the copy of a run was last complete, by our clock; 0 if that is not known."""
        return self._noted(REFRESHED, path)

    def seen(self, path: Path | str) -> float:
        """Return when the copy of a run was last complete but for its logs."""
        return max(self.refreshed(path), self._noted(SEEN, path))

    def _noted(self, file: str, path: Path | str) -> float:
        with suppress(OSError, ValueError, TypeError, KeyError):
            return float(
                read_object(self.base / file)[Path(path).relative_to(self.folder).as_posix()]
            )
        return 0.0

    def copies(self, run: str) -> dict[str, list[int]]:
        """Return what it has of a run, for the reader."""
        folder, found = self._run(run), {}
        for path in list_files(folder):
            copy = describe_copy(
                folder / path, skipped_bytes(folder / path) if kind_of(path) == LOG else 0
            )
            if copy is not None:
                found[path] = copy.to_row()
        return found

    # -- what arrives ----------------------------------------------------------------------------------

    def apply(self, frame: Frame) -> None:
        """Write down what a frame says."""
        try:
            self._apply(frame)
        # also a name that no file can have
        except (ValueError, ArithmeticError, TypeError) as problem:
            raise BadStream(
                f"{frame.kind[:50]!r} has a bad value: {type(problem).__name__}"
            ) from None

    def _apply(self, frame: Frame) -> None:
        if frame.kind == frames.FOUND:
            self._scratch = frame.text("scratch")
            self._hear(frame)
        elif frame.kind in (frames.PASS, frames.ALIVE):
            self._hear(frame)
        elif frame.kind in (frames.DATA, frames.RECORD, frames.CLAIM, frames.GONE, frames.JOBS):
            self._require_space(len(frame.body))
            with self.lock():
                self._change(frame)
        else:
            raise BadStream(f"unknown frame {frame.kind[:50]!r}")

    def _change(self, frame: Frame) -> None:
        if frame.kind == frames.JOBS:
            try:
                keep_states(
                    self.base, frame.table("jobs"), frame.text("problem"), frame.text("hint")
                )
            except ValueError as problem:
                raise BadStream(str(problem)) from None
        elif frame.kind == frames.CLAIM:
            self._claim(self._run(frame.text("run")), frame.number("number"), frame.text("name"))
        elif frame.kind == frames.GONE:
            self._file(frame, (RECORD,)).unlink(missing_ok=True)
        elif frame.kind == frames.RECORD:
            if len(frame.body) > MAX_RECORD:
                raise BadStream("a record is too large")
            _replace(self._file(frame, (RECORD,)), frame.body, frame.number("modified"))
        else:
            self._extend(frame)

    def _extend(self, frame: Frame) -> None:
        """Append to a file what it does not have yet. One that is not the same file any more begins anew."""
        path, offset, content = self._file(frame, None), frame.number("offset"), frame.body
        relation, modified = frame.number("relation"), frame.number("modified")
        if offset + len(content) > MAX_FILE:
            raise BadStream("a file is too large")
        try:
            descriptor = open_own_file(path, os.O_RDWR)
        except FileNotFoundError:
            fits = False
        else:
            with open(descriptor, "r+b", buffering=0) as file:
                fits = _append(
                    file, offset, content, modified, first=skipped_bytes(path), relation=relation
                )
        if not fits and relation == frames.NEXT:
            raise BadStream("a file has other content than before")
        if not fits:
            self._begin(path, offset, content, modified)

    def _begin(self, path: Path, offset: int, content: bytes, modified: int) -> None:
        """Make a file anew. What comes before the offset is not here: the file has a hole there."""
        skipped = skipped_path(path)
        if offset:
            _replace(skipped, str(offset).encode(), modified)
        _replace(path, content, modified, offset)
        if not offset:
            skipped.unlink(missing_ok=True)

    def _claim(self, run: Path, number: int, name: str) -> None:
        if not is_claim(number, name):
            raise BadStream("this is not a claim")
        link = self._parent(run / "claims" / str(number)) / str(number)
        with suppress(OSError):
            if os.readlink(link) == name:
                return
        link.unlink(missing_ok=True)
        os.symlink(name, link)

    def refresh(self, runs: Iterable[str], *, with_logs: bool = True) -> None:
        """Note that the copies of these runs are complete now."""
        file = self.base / (REFRESHED if with_logs else SEEN)
        with self.lock():
            known: dict[str, Any] = {}
            with suppress(OSError, ValueError):
                known = read_object(file)
            table = known | dict.fromkeys(runs, time.time())
            kept = {
                run: moment
                for run, moment in table.items()
                if is_run_path(run) and (self.folder / run).is_dir()
            }
            write_atomically(file, json.dumps(kept), mode=0o600)

    def _hear(self, frame: Frame) -> None:
        there = frame.values.get("time")
        if (
            not isinstance(there, int | float)
            or isinstance(there, bool)
            or not 0 <= there < MAX_TIME
        ):
            raise BadStream("the reader has no clock")
        table = {"scratch": self._scratch, "there": there, "here": time.time()}
        write_atomically(self.base / STATE, json.dumps(table), mode=0o600)

    # -- paths -----------------------------------------------------------------------------------------

    def _run(self, run: str) -> Path:
        if not is_run_path(run):
            raise BadStream(f"{run[:100]!r} is not the path of a run")
        return self.folder / run

    def _file(self, frame: Frame, kinds: tuple[str, ...] | None) -> Path:
        """Return where a file is in the mirror, with its folders made."""
        run, path = self._run(frame.text("run")), frame.text("path")
        kind = kind_of(path)
        if kind is None or (kind not in kinds if kinds is not None else kind == RECORD):
            raise BadStream(f"{path[:100]!r} is not a file that is mirrored")
        return self._parent(run / path) / os.path.basename(path)

    def _parent(self, path: Path) -> Path:
        """Make the folder of a file. Raises BadStream if a link leads out of the mirror."""
        parent = path.parent
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.realpath(parent) != os.path.join(
            os.path.realpath(self.folder), parent.relative_to(self.folder)
        ):
            raise BadStream(f"{parent} is a link")
        return parent

    def _require_space(self, size: int) -> None:
        self._unchecked += size
        if self._unchecked >= CHECK_INTERVAL:
            self._unchecked = 0
            if shutil.disk_usage(self.folder).free < MIN_FREE:
                raise OSError(28, "No space left for the mirror", str(self.folder))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes, for a moment. Raises MirrorBusy if another one does not get on with it."""
        with write_lock(self.base / "lock"):
            yield


def _append(
    file: Any, offset: int, content: bytes, modified: int, *, first: int, relation: int
) -> bool:
    """Append what a file lacks of a content; return whether that fits to what it has from the byte `first` on."""
    size = os.fstat(file.fileno()).st_size
    known = min(max(0, size - offset), len(content))
    is_longer = size > offset + len(content)
    if not first <= offset <= size or (is_longer and relation == frames.REPLACED):
        return False
    if os.pread(file.fileno(), known, offset) != content[:known]:
        return False
    if not is_longer:
        file.seek(0, os.SEEK_END)
        _write_all(file, content[known:])
        os.utime(file.fileno(), ns=(modified, modified))
    return True


def _replace(path: Path, content: bytes, modified: int, offset: int = 0) -> None:
    """Put a file in place that has this content from an offset on."""
    partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            file.truncate(offset)
            file.seek(offset)
            _write_all(file, content)
            os.utime(descriptor, ns=(modified, modified))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_all(file: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
