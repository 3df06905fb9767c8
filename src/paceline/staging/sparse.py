"""Files with holes: which parts of them hold something."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def data_ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that are not holes, as (start, end). Where holes are unknown, that
    is all of it.
    """
    if not hasattr(os, "SEEK_DATA"):
        yield start, end
        return
    while start < end:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
            stop = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole is left
                yield start, end
            return
        if start < end:
            yield start, min(stop, end)
        start = stop


def data_size(status: os.stat_result, path: str) -> int:
    """Return how many bytes of a regular file are not in holes."""
    if not 0 <= status.st_blocks * 512 < status.st_size:  # by far the most files
        return status.st_size
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return status.st_size
    try:
        return sum(end - start for start, end in data_ranges(descriptor, 0, status.st_size))
    finally:
        os.close(descriptor)
