"""Finds ranks that linger, i.e. do nothing although others of the run have exited.

A rank may legitimately outlive the others, e.g. to evaluate or to upload a model. So none of them
counts as lingering as long as one of them makes progress: the rest may wait for it. And a rank with
child processes may wait for a child.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from paceline.agent import retry_policy
from paceline.agent.health.heartbeat import ActivityMonitor, Heartbeats
from paceline.agent.rank_failures import Failure
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import process_tree
from paceline.agent.workers.started_ranks import Launch, StartedRanks
from paceline.contract.heartbeat_file import SAVED_AND_STOPPED

# The kinds of messages: all agents begin to watch their ranks; a member reports to the head agent.
RANK_EXITED, REPORT = KINDS = ("rank_exited", "idle")
WITH_CHILDREN = 10  # times the timeout for ranks that may wait for a child process
HINT = "to change this, set --exit-timeout (0s: never)"


@dataclass(frozen=True)
class IdleRank:
    """A rank that still runs, and how long it has made no progress."""

    rank: int
    host: str
    state: int
    seconds: float
    script_ended: bool
    has_children: bool

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for a child process, which may do the work."""
        return self.has_children and self.state != SAVED_AND_STOPPED

    @property
    def has_finished(self) -> bool:
        """Whether only its process did not exit: no work is lost."""
        return has_finished(self.state, script_ended=self.script_ended) and not self.may_wait


def has_finished(state: int, *, script_ended: bool) -> bool:
    """Whether a rank has completed its script, or has saved and stopped."""
    return script_ended or state == SAVED_AND_STOPPED


class LingeringRanks:
    """One agent's part: a member reports its ranks to the head agent, which finds those that
    linger.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        workers: StartedRanks,
        heartbeats: Heartbeats,
        rendezvous: Rendezvous,
    ) -> None:
        self._placement, self._attempt = launch.placement, launch.attempt
        self._spawns = launch.launch_spec.style == "spawn"
        self._workers, self._heartbeats, self._rendezvous = workers, heartbeats, rendezvous
        self._rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
        self._timeout = launch.launch_spec.exit_timeout
        self._is_watching = False
        self._activity = ActivityMonitor(heartbeats, self._timeout)
        self._reported: dict[int, list[IdleRank]] = {}  # by agent
        self._remaining: set[int] = set()  # ranks that still run, on all nodes
        self._since = 0.0  # when the last one of the others was found to have ended

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in a message of another agent."""
        if not self._is_watching:
            self._watch(tell=self._placement.is_head)
        if message["kind"] == REPORT:
            self._reported[int(message["from"])] = [
                IdleRank(*fields) for fields in message["ranks"]
            ]

    def check(
        self, local_ranks: Collection[int], *, ended_agents: Collection[int]
    ) -> list[IdleRank]:
        """Report these ranks, which have not ended, to the head agent; there, return all ranks if
        they linger.
        """
        now = time.monotonic()
        if not self._timeout or not self._activity.is_due(now):
            return []
        pids = self._pids(local_ranks)
        if not self._is_watching:
            if len(pids) == len(self._rank_of):
                return []
            self._watch(tell=True)
        own = [
            IdleRank(
                self._rank_of[local_rank],
                self._placement.host,
                self._heartbeats.read(local_rank).state,
                round(now - activity.since, 3),
                self._heartbeats.has_script_ended(local_rank),
                activity.has_children,
            )
            for local_rank, activity in self._activity.check(pids, now).items()
        ]
        if not self._placement.is_head:
            self._rendezvous.send({"kind": REPORT, "ranks": [astuple(idle) for idle in own]}, to=0)
            return []
        self._reported[0] = own
        running = set(range(self._placement.count)) - set(ended_agents)
        if not running <= set(self._reported):
            return []
        idle = [rank for agent in sorted(running) for rank in self._reported[agent]]
        remaining = {each.rank for each in idle}
        if remaining != self._remaining:  # the others may have waited for one that has ended
            self._remaining, self._since = remaining, now
        shortest = min([now - self._since, *(each.seconds for each in idle)])
        return idle if shortest >= self._limit(idle) else []

    def _watch(self, *, tell: bool) -> None:
        """Look at the ranks from now on. Members tell the head agent, which tells all others."""
        self._is_watching = True
        if tell:
            self._rendezvous.send({"kind": RANK_EXITED})

    def _limit(self, idle: list[IdleRank]) -> float:
        return self._timeout * (WITH_CHILDREN if any(rank.may_wait for rank in idle) else 1)

    def failure(self, lingering: list[IdleRank], detected: float) -> Failure | None:
        """Return the failure of the first rank that has not finished; None if only their processes
        did not exit.
        """
        unfinished = [idle for idle in lingering if not idle.has_finished]
        if not unfinished:
            return None
        first, *rest = unfinished
        others = f", as did {_names(rest)}" if rest else ""
        message = (
            f"it made no progress for {self._limit(lingering):g} s after other ranks had "
            f"exited{others}; {HINT}"
        )
        log = str(self._attempt.stacks(first.rank))
        return Failure(
            retry_policy.LINGERED, first.host, first.rank, message=message, time=detected, log=log
        )

    def describe(self, lingering: list[IdleRank]) -> str:
        """Say what is done about these ranks."""
        return (
            f"other ranks had exited, so these were killed after {self._limit(lingering):g} s "
            f"without progress: {_names(lingering)}"
        )

    def _pids(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Map the ranks that still run to their processes; 0 if not known.

        torchrun, and a script that spawns its ranks, report exits only once all ranks have ended.
        """
        started = self._workers.pids()
        parent = next(iter(started.values()), 0) if self._spawns else 0
        pids = {
            rank: self._heartbeats.read(rank).pid or started.get(rank, parent)
            for rank in local_ranks
        }
        return {rank: pid for rank, pid in pids.items() if not pid or process_tree.is_alive(pid)}


def _names(ranks: Iterable[IdleRank]) -> str:
    """Return "rank 1 on a, rank 3 on b", shortened."""
    names = [f"rank {idle.rank} on {idle.host}" for idle in ranks]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
