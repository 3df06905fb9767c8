"""The signal on which a rank writes its Python stacks, and whether it still does."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from contextlib import suppress
from typing import Any

from paceline.contract.heartbeat_file import WRITES_STACKS, writes_stacks_offset


def write_stacks_on_signal(
    path: str | os.PathLike[str], *, heartbeat_file: str, local_rank: int
) -> None:
    """From now on, append the Python stacks of all threads to a file on SIGUSR2, until the script
    takes the signal.

    A script may save and exit on SIGUSR2, so the heartbeat file says whose the signal is. Nobody
    else can know.
    """
    if not hasattr(signal, "SIGUSR2"):
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        descriptor = 2
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    _mark(heartbeat_file, local_rank, 1)
    original, rank = signal.signal, os.getpid()

    @functools.wraps(original)
    def watched_signal(signalnum: Any, handler: Any) -> Any:
        # not in a process that the script has forked
        if signalnum == signal.SIGUSR2 and os.getpid() == rank:
            _mark(heartbeat_file, local_rank, 0)
        return original(signalnum, handler)

    signal.signal = watched_signal


def _mark(heartbeat_file: str, local_rank: int, value: int) -> None:
    # without it, the agent is gone
    with suppress(OSError), open(heartbeat_file, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), WRITES_STACKS.pack(value), writes_stacks_offset(local_rank))
