"""Operations on processes: find descendants and what they use, adopt orphans, send signals."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.contract.process import prctl

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# A process that uses more than this, its descendants included, makes progress.
BUSY_CPU = 0.01  # of one core
BUSY_IO = 1024  # bytes per second


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, so that none escapes."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `top` and `ps -e` show."""
    prctl(_PR_SET_NAME, name.encode()[:15])


def raise_descriptor_limit(wanted: int) -> int:
    """Let this process open so many files, as far as the hard limit allows, and return how many it
    may open now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def read_stats(proc: Path = Path("/proc")) -> dict[int, list[bytes]]:
    """Map every running process to the fields of /proc/PID/stat from its state on."""
    stats = {}
    for entry in os.listdir(proc) if sys.platform == "linux" else ():
        fields = _read_stat(f"{proc}/{entry}/stat") if entry.isdigit() else []
        if fields and fields[0] not in (b"Z", b"X"):
            stats[int(entry)] = fields
    return stats


def _read_stat(path: str) -> list[bytes]:
    """Return the fields behind the name, which is in parentheses and may contain anything."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str:
    """Return the kernel's state letter of a process (R, S, D, T, Z ...); empty if there is none."""
    fields = _read_stat(f"/proc/{pid}/stat")
    return fields[0].decode() if fields else ""


def descendants(root: int, stats: Mapping[int, list[bytes]] | None = None) -> set[int]:
    """Return all running processes below this one."""
    children: dict[int, list[int]] = {}
    for process, fields in (read_stats() if stats is None else stats).items():
        children.setdefault(int(fields[1]), []).append(process)
    found: set[int] = set()
    pending = [root]
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


class Usage(NamedTuple):
    """What a process has used, together with its descendants."""

    cpu: float  # seconds
    io: int  # bytes read and written; those that `send` and `recv` transfer do not count as such
    is_suspended: bool  # a thread waits for a disk, or is stopped by a signal or a debugger
    has_children: bool

    def differs(self, before: Usage, elapsed: float) -> bool:
        """Whether a process has worked since `before`. A number falls when a child ends."""
        return (
            self.is_suspended
            or abs(self.cpu - before.cpu) >= BUSY_CPU * elapsed
            or abs(self.io - before.io) >= BUSY_IO * elapsed
        )


def tree_usage(roots: Iterable[int]) -> dict[int, Usage]:
    """Return what each of these processes uses. Those that are gone are left out."""
    stats = read_stats()
    usage = {}
    for root in set(roots) & set(stats):
        tree = {root, *descendants(root, stats)}
        # User and system time, of the process and of its children that have ended.
        ticks = sum(int(count) for pid in tree for count in stats[pid][11:15])
        suspended = any(state in b"DTt" for pid in tree for state in _thread_states(pid))
        io = sum(map(_transferred, tree))
        usage[root] = Usage(ticks / os.sysconf("SC_CLK_TCK"), io, suspended, len(tree) > 1)
    return usage


def _transferred(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _thread_states(pid: int) -> Iterator[bytes]:
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError, IndexError):
            yield path.read_bytes().rpartition(b")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    return state(pid) not in ("", "Z", "X")


def await_end(pid: int, timeout: float) -> None:
    """Wait until a process has ended, whoever's child it is."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return
        except ChildProcessError:
            if not is_alive(pid):
                return
        time.sleep(0.005)


def has_handler(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def send_signal(pid: int, signum: int) -> bool:
    """Signal one process. Returns False if it is gone."""
    try:
        os.kill(pid, signum)
    except OSError:
        return False
    return True


def signal_group(leader: int, signum: int) -> bool:
    """Signal a whole process group. Returns False if it is empty."""
    try:
        os.killpg(leader, signum)
    except OSError:
        return False
    return True


def kill_descendants(root: int, *, timeout: float = 5.0) -> None:
    """Kill all processes below this one, those started meanwhile included."""
    deadline = time.monotonic() + timeout
    while remaining := descendants(root):
        for pid in remaining:
            send_signal(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
