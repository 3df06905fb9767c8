"""When the output of a log came: `rank-0.times` beside `rank-0.log`.

Each line is a mark, `OFFSET TIME`: what follows in the log from this byte on came at this time or
later, until the next mark. All lines have the same length, so that binary search finds a time or an
offset. A mark is written before the output that it belongs to. Both numbers only grow.
"""

from __future__ import annotations

from pathlib import Path

MARK_SIZE = 32  # bytes of a line


def times_path(log: Path) -> Path:
    """Return the path of the file with the times of a log."""
    return log.with_suffix(".times")


def format_mark(offset: int, time: float) -> bytes:
    return f"{offset:016d} {time:014.3f}\n".encode()


def parse_mark(line: bytes) -> tuple[int, float] | None:
    """Return the offset and the time of a mark; None if it is not one."""
    if len(line) != MARK_SIZE or (line[16:17], line[27:28], line[31:]) != (b" ", b".", b"\n"):
        return None
    if not (line[:16] + line[17:27] + line[28:31]).isdigit():
        return None
    return int(line[:16]), float(line[17:31])
