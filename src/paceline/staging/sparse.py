"""Files with holes: what they really hold, and copies that have the same holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

BLOCK = 1 << 20  # bytes read at a time
_ZEROS = bytes(BLOCK)


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


def data_blocks(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield a file's blocks with their offsets, except those that are all zeros: equal files give
    equal blocks.
    """
    position = 0
    while position < size:
        content = _read(descriptor, min(BLOCK, size - position), position)
        if not content:
            return  # it became shorter
        if content != _ZEROS[: len(content)]:
            yield position, content
        position += len(content)
        if position < size and size > BLOCK:
            following = next(data_ranges(descriptor, position, size), (size, size))[0]
            position = max(position, following // BLOCK * BLOCK)


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


def copy_data(reader: int, writer: int, size: int) -> None:
    """Copy a file into an empty one, without its holes."""
    os.ftruncate(writer, size)
    for offset, content in data_blocks(reader, size):
        done = 0
        while done < len(content):
            done += os.pwrite(writer, memoryview(content)[done:], offset + done)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    content = os.pread(descriptor, size, offset)
    while len(content) < size and (
        more := os.pread(descriptor, size - len(content), offset + len(content))
    ):
        content += more
    return content
