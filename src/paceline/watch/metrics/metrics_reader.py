"""Read `metrics.jsonl` as it grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from paceline.contract.files.foreign_records import parse_object
from paceline.contract.files.shared_folders import open_without_waiting

CHUNK = 1 << 20  # bytes
MAX_LINE = 1 << 20  # a longer one is not ours
LARGE = 16 << 20  # bytes; a file that is larger at first is sampled
SAMPLES = 500  # places in a large file
SAMPLE = 16384  # bytes to read at each of them
SAMPLE_LINES = 8  # to parse of those, and all that have more or fewer numbers
TAIL = 1 << 18  # bytes at the end of a large file, which are read whole


class MetricsReader:
    """A metrics file and how far it has been read: each call returns what has been written since
    the last one.

    Of a file that is large at the first call, lines at evenly spaced places are read, and all at
    its end: curves have fewer points than it has lines anyway, and nobody waits for a million of
    them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.is_sampled = False

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that are new. A file that has become shorter is read from its
        beginning.
        """
        try:
            descriptor = open_without_waiting(self.path, follow=True)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.position:
                self.position, self.is_sampled = 0, False
            if self.position == 0 and size > LARGE:
                self.is_sampled = True
                yield from self._read_samples(file, size - TAIL)
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

    def _read_samples(self, file: IO[bytes], end: int) -> Iterator[dict[str, Any]]:
        """Yield lines at evenly spaced places before `end`, and continue at the first line after
        it.
        """
        for number in range(SAMPLES):
            file.seek(number * end // SAMPLES)
            if number:
                file.readline(MAX_LINE)  # the rest of a line
            usual = -1
            for position, line in enumerate(
                (file.read(SAMPLE) + file.readline(MAX_LINE)).split(b"\n")
            ):
                length = line.count(b'":')  # an evaluation logs other numbers than a step does
                if position < SAMPLE_LINES or length != usual:
                    usual = length if position < SAMPLE_LINES else usual
                    if record := _parse(line):
                        yield record
        file.seek(end)
        file.readline(MAX_LINE)
        self.position = file.tell()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return parse_object(line) if line else {}
    except ValueError:  # a line that a crash has cut off, or somebody else's
        return {}
