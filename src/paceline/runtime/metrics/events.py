"""Lines that one writer appends to its own file: events and metrics. A full disk costs the lines, never the run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Lines:
    """An append-only file of JSON lines, opened once. Everything is a no-op when `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, text: str) -> None:
        """Whole lines, in one write, so that a reader never sees half of one that another write finished."""
        if self.path is None or not text:
            return
        try:
            if self._descriptor is None:
                self._descriptor = self._open(self.path)
            os.write(self._descriptor, text.encode())
        except OSError as error:
            print(
                f"paceline: {self.path} is no longer written: {error.strerror}", file=sys.stderr, flush=True
            )
            self.path = None

    @staticmethod
    def _open(path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(descriptor).st_size
        # An attempt that was killed may have left half a line: end it, so that only that one is lost.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Events(Lines):
    """What happened and when, as this rank saw it."""

    def write(self, event: str, **fields: Any) -> None:
        self.append(json.dumps({"time": time.time(), "event": event, **fields}, default=str) + "\n")
