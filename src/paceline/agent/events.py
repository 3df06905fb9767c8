"""What happened and when, one JSON object per line: `events/<writer>.jsonl`, one writer each."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Events:
    """Appends to one writer's file. A full disk costs the events, never the run."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.path = folder / f"{writer}.jsonl"
        self._warned = False

    def write(self, event: str, **fields: Any) -> None:
        line = (
            json.dumps({"time": time.time(), "event": event, **fields}, ensure_ascii=False, default=str)
            + "\n"
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Opened each time: events are rare, and a file that was moved or an NFS server that came back is no
            # reason to lose the rest. One write call, so that a reader never sees half of two lines.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(f"paceline: events are not recorded ({self.path}: {error.strerror})", file=sys.stderr)
