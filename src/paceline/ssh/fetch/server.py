"""The side of the cluster: lists a run folder and sends files of it, for as long as the other side asks."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from paceline.contract.checkpoint.names import is_weights_file
from paceline.contract.files.shared_folders import open_regular
from paceline.contract.run_folder import RunFolder
from paceline.contract.run_path import run_path_of
from paceline.ssh.fetch.contents import choose_contents
from paceline.ssh.fetch.frames import CHUNK, read_line, write_frame, write_line

SPARE_DESCRIPTORS = 64
APPENDED = (".log", ".jsonl", ".times", ".journal", ".out", ".err")


class FileServer:
    def __init__(self, folder: RunFolder, *, status: Callable[[], str]) -> None:
        self.folder, self._status = folder, status
        self._held: dict[str, int] = {}

    def serve(self, source: IO[bytes], sink: IO[bytes]) -> None:
        """Answer questions until there are no more."""
        while True:
            try:
                asked = read_line(source)
            except EOFError:
                return
            if "list" in asked:
                write_line(sink, self._list(asked["list"], asked.get("skip", ())))
            for name, offset in asked.get("send", ()):
                self._send(name, offset, sink)
            sink.flush()

    def _list(self, what: str, skip: list[str]) -> dict[str, Any]:
        # before the files: a run that is over by then has written all of them
        status = self._status()
        found = choose_contents(self.folder, what, skip=skip)
        self._hold([each.name for each in found.files if each.name.startswith("checkpoints/")])
        path = run_path_of(self.folder)
        run_path = [path.project, *path.experiment.split("/"), path.run_id]
        return {
            "folder": str(self.folder.path),
            "key": self.folder.key,
            "run_path": run_path,
            "status": status,
            **asdict(found),
            "files": [asdict(each) for each in found.files],
        }

    def _hold(self, names: list[str]) -> None:
        """Open the files of checkpoints, as far as the system allows: a run removes old ones while they are sent."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        room = hard - SPARE_DESCRIPTORS if hard != resource.RLIM_INFINITY else len(names)
        newest = sorted(names, key=lambda name: name.split("/")[1], reverse=True)
        for name in newest[: max(0, room)]:
            try:
                self._held[name] = open_regular(self.folder.path / name)[0]
            except OSError:
                continue  # sending it says why

    def _send(self, name: str, offset: int, sink: IO[bytes]) -> None:
        """Send a file from an offset on, as long as it is now, and then the checksum of all of it."""
        try:
            descriptor = self._held.pop(name, None)
            if descriptor is None:
                path = self.folder.path / name
                descriptor = open_regular(path, follow=name.startswith("code/"))[0]
        except OSError as problem:
            is_gone = problem.errno in (errno.ENOENT, errno.ENOTDIR)
            write_line(
                sink, {"name": name, "error": problem.strerror or str(problem), "is_gone": is_gone}
            )
            return
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            offset = offset if offset <= status.st_size else 0
            about = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "offset": offset}
            write_line(sink, {"name": name, **about})
            try:
                write_line(sink, self._send_content(file, name, status, offset, sink))
            except _Interrupted as problem:
                write_frame(sink, b"", compress=False)
                write_line(sink, {"error": str(problem)})

    def _send_content(
        self, file: Any, name: str, before: os.stat_result, offset: int, sink: IO[bytes]
    ) -> dict[str, str | int | bool]:
        total, position, size = hashlib.sha256(), 0, before.st_size
        file.seek(0)
        while position < size:
            end = offset if position < offset else size
            try:
                part = file.read(min(CHUNK, end - position))
            except OSError as problem:  # such as a file that another machine has removed
                raise _Interrupted(problem.strerror) from None
            if not part:
                break
            total.update(part)
            if position >= offset:
                write_frame(sink, part, compress=_is_text(name))
            position += len(part)
        write_frame(sink, b"", compress=False)
        after = os.fstat(file.fileno())
        changed = position < size or (after.st_size, after.st_mtime_ns) != (
            size,
            before.st_mtime_ns,
        )
        if changed and position == size and _is_appended(name):
            changed = not _begins_with(file, size, total.digest())
        return {"sha256": total.hexdigest(), "size": position, "changed": changed}


class _Interrupted(Exception):
    pass


def _is_text(name: str) -> bool:
    return not is_weights_file(name) and not name.endswith((".zip", ".gz", ".png"))


def _is_appended(name: str) -> bool:
    """Whether a file of this name only grows, as far as anybody can know: it is then complete up to where it ended."""
    return name.endswith(APPENDED) or ".tfevents." in name.rpartition("/")[2]


def _begins_with(file: Any, size: int, digest: bytes) -> bool:
    """Whether a file still begins with the content that was sent. One may be rewritten in place and be longer."""
    total, position = hashlib.sha256(), 0
    try:
        file.seek(0)
        while position < size and (part := file.read(min(CHUNK, size - position))):
            total.update(part)
            position += len(part)
    except OSError:
        return False
    return total.digest() == digest
