"""A process: what it inherits, how others recognize it, and how it ends with its parent."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

# seconds for which a process that keeps torch imported stays unused: `warm = true` in [launch]
DEFAULT_WARM = 600

_PR_SET_PDEATHSIG = 1

# what a rank's program has ended with; None while it runs, and in other processes
exit_code: Any = None

failure_context = ""  # a sentence that an uncaught exception of the program is reported with


def is_open(descriptor: int) -> bool:
    """Whether this process has an open file with this number."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def boot_id() -> str:
    """Return what names this start of this machine; empty where there is no such thing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Return the boot id and the kernel's start time of a process, which tell it from others with
    the same pid; empty if it does not run.
    """
    try:
        values = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return _process_start_by_ps(pid) if sys.platform == "darwin" else ""
    return "" if values[0] in (b"Z", b"X") else f"{boot_id()} {int(values[19])}"


def _process_start_by_ps(pid: int) -> str:
    import subprocess  # not at the top: only macOS needs it

    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_exit(code: int) -> str:
    """Describe an exit code; a negative one is a signal."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def prctl(option: int, value: int | bytes) -> None:
    """Call Linux's prctl; elsewhere, do nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int | None, signum: int = signal.SIGKILL) -> None:
    """Get `signum` when the parent ends, even by kill -9. Exit at once if `parent` is no longer
    the parent.
    """
    prctl(_PR_SET_PDEATHSIG, int(signum))
    if sys.platform == "linux" and parent is not None and os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    prctl(_PR_SET_PDEATHSIG, 0)
