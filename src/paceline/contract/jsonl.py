"""Appending JSON lines to a file with a single writer. A full disk costs the lines, never the
run.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class LineWriter:
    """An append-only file of whole lines. Everything is a no-op when `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._has_warned = False

    def append(self, text: str) -> bool:
        """Append whole lines in one write, so that a reader never sees parts of two lines mixed.

        Returns False if they are lost.
        """
        if self.path is None or not text:
            return True
        # file names may hold any bytes; in JSON this is an escape
        data = text.encode(errors="backslashreplace")
        try:
            self._write(self.path, data)
        except OSError as error:
            self.close()  # a file server that was away for a moment invalidates open files
            if not self._has_warned:
                self._has_warned = True
                message = f"could not write to {self.path} ({error.strerror}); some lines are lost"
                print(f"paceline: {message}", file=sys.stderr, flush=True)
            return False
        return True

    def _write(self, path: Path, data: bytes) -> None:
        if self._descriptor is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
            size = os.fstat(self._descriptor).st_size
            # A killed writer or a full disk may have left half a line: end it, so that only that
            # line is lost.
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
        if os.write(self._descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventWriter(LineWriter):
    """`events/<writer>.jsonl`: what happened and when, as one writer saw it."""

    def write(self, event: str, **fields: Any) -> None:
        line = {"time": time.time(), "event": event, **fields}
        self.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
