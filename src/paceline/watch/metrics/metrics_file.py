"""Read `metrics.jsonl` as it grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contract.files.foreign_records import parse_object
from paceline.contract.files.shared_places import open_without_waiting

CHUNK = 1 << 20  # bytes
MAX_LINE = 1 << 20  # a longer one is not ours


class MetricsFile:
    """A metrics file and how far it has been read: each call returns what has been written since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that are new. A file that has become shorter is read from its beginning."""
        try:
            descriptor = open_without_waiting(self.path, follow=True)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.position:
                self.position = 0
            file.seek(self.position)
            rest = b""
            while chunk := file.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                self.position += len(chunk)
                for line in lines:
                    if record := _parse(line):
                        yield record
                if len(rest) > MAX_LINE:
                    rest = b""
            self.position -= len(rest)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return parse_object(line)
    except ValueError:  # a line that a crash has cut off, or somebody else's
        return {}
