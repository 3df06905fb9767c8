"""Processes seen from outside: who descends from whom, who dies with whom, and how one ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from paceline.contract.process import prctl

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that none escapes it."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """What `top` and `ps -e` show."""
    prctl(_PR_SET_NAME, name.encode()[:15])


def _parents(*, dead: bool = False) -> dict[int, int]:
    """Every living process (or every zombie) and its parent."""
    found = {}
    for entry in os.listdir("/proc") if sys.platform == "linux" else ():
        if entry.isdigit():
            try:
                # The name stands in brackets and may hold anything: what follows the last one is regular.
                state, parent = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if (state in (b"Z", b"X")) is dead:
                found[int(entry)] = int(parent)
    return found


def descendants(*roots: int) -> set[int]:
    """All living processes below these."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents().items():
        children.setdefault(parent, []).append(process)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def dead_children(parent: int) -> set[int]:
    """Children that have ended and that nobody has waited for."""
    return {pid for pid, its in _parents(dead=True).items() if its == parent}


def alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in (b"Z", b"X")


def send(pid: int, signum: int) -> bool:
    """Signal one process; False when it is gone."""
    try:
        os.kill(pid, signum)
    except OSError:
        return False
    return True


def send_group(leader: int, signum: int) -> bool:
    """Signal a whole process group; False when nobody is left in it."""
    try:
        os.killpg(leader, signum)
    except OSError:
        return False
    return True


def sweep(*roots: int, spare: Collection[int] = (), patience: float = 5.0) -> None:
    """Kill all that is left below these processes. What is born meanwhile is found by the next look."""
    deadline = time.monotonic() + patience
    while left := descendants(*roots).difference(spare):
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def told(code: int) -> str:
    """How a process ended, in words; a negative code is a signal."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
