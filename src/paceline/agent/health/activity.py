"""Whether ranks make progress, by what they use: CPU time, files, connections, output and
heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.health.process_usage import Usage, tree_usage

CHECKS = 6  # per timeout
PAUSE = 2.0  # seconds; after a longer time without a check, the whole job may have been suspended
# A rank that uses more than this, its child processes included, makes progress.
BUSY_CPU = 0.01  # of one core
BUSY_IO = 1024  # bytes per second


@dataclass
class Activity:
    """What a rank had used at a check, and since when it has made no progress."""

    usage: Usage | None
    heartbeat: float  # time of the last one
    output: int  # bytes that it has printed
    since: float

    @property
    def has_children(self) -> bool:
        return self.usage is not None and self.usage.has_children

    def differs(self, before: Activity, elapsed: float) -> bool:
        """Whether the rank has made progress since `before`."""
        now, then = self.usage, before.usage
        if now is None or then is None or self.heartbeat != before.heartbeat or now.is_suspended:
            return True
        if self.output != before.output:
            return True
        return (
            abs(now.cpu - then.cpu) >= BUSY_CPU * elapsed
            or abs(now.io - then.io) >= BUSY_IO * elapsed
        )


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
        self._heartbeats, self._interval, self._count_output = (
            heartbeats,
            timeout / CHECKS,
            count_output,
        )
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
            heartbeat, output = (
                self._heartbeats.read(local_rank).time,
                self._count_output(local_rank),
            )
            activity = Activity(usage.get(pid), heartbeat, output, since=now)
            before = self._known.get(local_rank)
            if before is not None and not activity.differs(before, elapsed):
                activity.since = before.since
            self._known[local_rank] = activity
        return {local_rank: self._known[local_rank] for local_rank in sorted(pids)}
