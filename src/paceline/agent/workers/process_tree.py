"""Operations on processes: find descendants, adopt orphans, send signals, describe exit codes."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.contract.process import prctl

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


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


def read_stats(proc: Path = Path("/proc"), *, dead: bool = False) -> dict[int, list[bytes]]:
    """Map every running process, or every zombie, to the fields of /proc/PID/stat from its state
    on.
    """
    stats = {}
    for entry in os.listdir(proc) if sys.platform == "linux" else ():
        fields = _read_stat(f"{proc}/{entry}/stat") if entry.isdigit() else []
        if fields and (fields[0] in (b"Z", b"X")) is dead:
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


def dead_children(parent: int) -> set[int]:
    """Return the children that have ended and not been reaped."""
    return {pid for pid, fields in read_stats(dead=True).items() if int(fields[1]) == parent}


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
