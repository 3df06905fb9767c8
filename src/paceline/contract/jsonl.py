"""Appending JSON lines to a file with a single writer. A full disk costs the lines, never the run."""

from __future__ import annotations

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

    def append(self, text: str) -> None:
        """Append whole lines in one write, so that a reader never sees parts of two lines mixed."""
        if self.path is None or not text:
            return
        try:
            if self._descriptor is None:
                self._descriptor = self._open(self.path)
            os.write(self._descriptor, text.encode())
        except OSError as error:
            # Open again for the next lines: the disk may have space by then, or the file server be back.
            self.close()
            if not self._has_warned:
                self._has_warned = True
                message = f"paceline: could not write to {self.path} ({error.strerror}); some lines are lost"
                print(message, file=sys.stderr, flush=True)

    @staticmethod
    def _open(path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(descriptor).st_size
        # A writer that was killed may have left half a line: end it, so that only that line is lost.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventWriter(LineWriter):
    """`events/<writer>.jsonl`: what happened and when, as one writer saw it."""

    def write(self, event: str, **fields: Any) -> None:
        line = {"time": time.time(), "event": event, **fields}
        self.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
