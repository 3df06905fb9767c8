"""The standard input of a run, which rank 0 reads."""

from __future__ import annotations

import os
import re
import stat

READS_INPUT = re.compile(r"\bstdin\b|\binput\(")


def has_input() -> bool:
    """Return whether there is a pipe or a file to read."""
    mode = _mode()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


class StandardInput:
    """As an agent got it. All of its ranks share one position in a file."""

    def __init__(self) -> None:
        self._start = os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(_mode()) else 0

    def rewind(self, program: str) -> str:
        """Prepare it for a restart of the program with this text. Return a warning if that cannot
        be done.
        """
        if stat.S_ISREG(_mode()):
            os.lseek(0, self._start, os.SEEK_SET)
        elif has_input() and READS_INPUT.search(program):
            return (
                "standard input is a pipe: the data that the last attempt read is lost; use a file"
            )
        return ""


def _mode() -> int:
    try:
        return os.fstat(0).st_mode
    except OSError:
        return 0
