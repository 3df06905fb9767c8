"""Whether ranks make progress, by what they use: CPU time, files, output and heartbeats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.workers import process_tree

CHECKS = 6  # per timeout
PAUSE = 2.0  # seconds; after a longer time without a check, the whole job may have been suspended
# A rank that uses more than this, its child processes included, makes progress.
BUSY_CPU = 0.01  # of one core
BUSY_IO = 1024  # bytes per second


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
    stats = process_tree.read_stats()
    usage = {}
    for root in set(roots) & set(stats):
        tree = {root, *process_tree.descendants(root, stats)}
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


@dataclass
class Activity:
    """What a rank had used at a check, and since when it has made no progress."""

    usage: Usage | None
    heartbeat: float  # time of the last one
    output: int  # bytes that it has printed
    since: float
    has_children: bool  # or has had some since then

    def differs(self, before: Activity, elapsed: float) -> bool:
        """Whether the rank has made progress since `before`."""
        if (self.heartbeat, self.output) != (before.heartbeat, before.output):
            return True
        if self.usage is None or before.usage is None:
            return True
        return self.usage.differs(before.usage, elapsed)


class ActivityMonitor:
    """The activity of this node's ranks, checked several times per timeout.

    With `count_output`, which returns the bytes that a local rank has printed, any output counts as
    progress.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        timeout: float,
        *,
        count_output: Callable[[int], int] = lambda local_rank: 0,
    ) -> None:
        self._heartbeats, self._count_output = heartbeats, count_output
        self._interval = timeout / CHECKS
        self._last_check = 0.0
        self._known: dict[int, Activity] = {}  # by local rank

    def is_due(self, now: float) -> bool:
        return now - self._last_check >= self._interval

    def check(self, pids: Mapping[int, int], now: float) -> dict[int, Activity]:
        """Return the activity of these ranks."""
        elapsed, self._last_check = now - self._last_check, now
        if elapsed > max(2 * self._interval, PAUSE):
            self._known.clear()
        usage = tree_usage(pids.values())
        for local_rank, pid in pids.items():
            heartbeat = self._heartbeats.read(local_rank).time
            output = self._count_output(local_rank)
            used = usage.get(pid)
            has_children = used is not None and used.has_children
            activity = Activity(used, heartbeat, output, now, has_children)
            before = self._known.get(local_rank)
            if before is not None and not activity.differs(before, elapsed):
                activity.since = before.since
                activity.has_children |= before.has_children
            self._known[local_rank] = activity
        return {local_rank: self._known[local_rank] for local_rank in sorted(pids)}
