"""A process that ends with its parent, on Linux."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def prctl(option: int, value: int | bytes) -> None:
    """Call Linux's prctl; elsewhere, do nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int | None, signum: int = signal.SIGKILL) -> None:
    """Get `signum` when the parent ends, even by kill -9. Exit at once if `parent` is no longer the parent."""
    prctl(_PR_SET_PDEATHSIG, int(signum))
    if sys.platform == "linux" and parent is not None and os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    prctl(_PR_SET_PDEATHSIG, 0)
