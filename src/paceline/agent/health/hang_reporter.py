"""The hang reporter: feeds the watchdog during an attempt, and dumps the stacks of ranks that
hang.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.agent import retry_policy
from paceline.agent.health import hang_detection
from paceline.agent.health.activity import ActivityMonitor
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.rank_failures import Failure
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import process_tree
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Launch, StartedRanks
from paceline.contract.heartbeat_file import READY
from paceline.contract.stacks import Stack, read_stack

STACKS_TIMEOUT = 2.0  # seconds for hung ranks to write their stacks


class HangReporter:
    """One agent's part: a member reports its ranks to the head agent, which looks for a hang."""

    def __init__(
        self,
        launch: Launch,
        *,
        workers: StartedRanks,
        output: OutputCapture,
        heartbeats: Heartbeats,
        rendezvous: Rendezvous,
    ) -> None:
        self._launch, self._workers = launch, workers
        self._heartbeats, self._rendezvous = heartbeats, rendezvous
        self._rank_of = {local_rank: rank for rank, local_rank in launch.ranks()}
        self._watchdog = hang_detection.Watchdog(launch.launch_spec.hang_timeout)
        self._cluster = hang_detection.ClusterHeartbeats()
        self._activity = ActivityMonitor(
            heartbeats,
            self._watchdog.timeout,
            count_output=lambda local_rank: output.count_bytes(self._rank_of[local_rank]),
        )
        # local ranks that have not begun a step, and may never
        self._idle_since: dict[int, float] = {}
        self._last_check = 0.0

    def update(self, message: Mapping[str, Any]) -> None:
        """Take in a member's report."""
        self._cluster.update(message)

    def check(self, local_ranks: Collection[int]) -> Failure | None:
        """Report these ranks to the head agent; on the head agent, return a hang and dump all
        stacks.
        """
        now = time.monotonic()
        if not self._watchdog.timeout or now - self._last_check < hang_detection.REPORT_INTERVAL:
            return None
        self._last_check = now
        self._check_activity(local_ranks, now)
        own = [self._heartbeat(local_rank, now) for local_rank in sorted(local_ranks)]
        if not self._launch.placement.is_head:
            self._rendezvous.send(hang_detection.make_report(own), to=0)
            return None
        known = self._cluster.all(own)
        hang = self._watchdog.check(known)
        if hang is None:
            return None
        # before the stacks are dumped: a rank that crashes meanwhile is not the cause
        detected = time.time()
        self.dump_all_stacks(local_ranks)
        hang = hang.compare_stacks(known, self._read_stacks(each.rank for each in known))
        first, limit = hang.first, f"--hang-timeout {self._watchdog.timeout:g}s"
        return Failure(
            retry_policy.HANG,
            first.host,
            first.rank,
            message=f"{hang} ({limit})",
            step=hang.step,
            time=detected,
            log=str(self._launch.attempt.stacks(first.rank)),
        )

    def dump_all_stacks(self, local_ranks: Collection[int]) -> None:
        """On the head agent: have all agents dump the stacks of their ranks, and dump those of
        this node.
        """
        self._rendezvous.send({"kind": "stacks"})
        self.dump_stacks(local_ranks)

    def dump_stacks(self, local_ranks: Collection[int]) -> None:
        """Ask the ranks of this node for their Python stacks, and wait until the files are
        written.
        """
        paths = []
        for local_rank, pid in self._pids(local_ranks).items():
            if self._writes_stacks(local_rank) and process_tree.send_signal(pid, signal.SIGUSR2):
                process_tree.send_signal(pid, signal.SIGCONT)  # a stopped process could not write
                paths.append(self._launch.attempt.stacks(self._rank_of[local_rank]))
        deadline = time.monotonic() + STACKS_TIMEOUT
        while time.monotonic() < deadline and not all(_has_text(path) for path in paths):
            time.sleep(0.05)

    def _writes_stacks(self, local_rank: int) -> bool:
        return self._heartbeats.read(local_rank).state >= READY and self._heartbeats.writes_stacks(
            local_rank
        )

    def _read_stacks(self, ranks: Iterable[int]) -> dict[int, Stack]:
        """Return the stacks that were dumped; those of other nodes may still be on their way."""
        found: dict[int, Stack] = {}
        for rank in ranks:
            with suppress(OSError):
                stack = read_stack(
                    self._launch.attempt.stacks(rank).read_text(encoding="utf-8", errors="replace")
                )
                found |= {rank: stack} if stack is not None else {}
        return found

    def _check_activity(self, local_ranks: Collection[int], now: float) -> None:
        """Find out since when ranks without step boundaries have been idle."""
        waiting = {rank for rank in local_ranks if self._heartbeats.read(rank).state == READY}
        if waiting and self._activity.is_due(now):
            pids = {
                rank: pid
                for rank, pid in self._pids(local_ranks).items()
                if rank in waiting and pid
            }
            self._idle_since = {
                rank: each.since for rank, each in self._activity.check(pids, now).items()
            }

    def _heartbeat(self, local_rank: int, now: float) -> hang_detection.RankHeartbeat:
        heartbeat = self._heartbeats.read(local_rank)
        age = max(0.0, time.time() - heartbeat.time)
        if heartbeat.state == READY:
            age = now - self._idle_since.get(local_rank, now)
        return hang_detection.RankHeartbeat(
            self._rank_of[local_rank],
            heartbeat.state,
            heartbeat.step,
            age,
            self._launch.placement.host,
            hang_detection.process_state(heartbeat.pid) if heartbeat.pid else "",
        )

    def _pids(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Return the processes of the ranks themselves; a script that spawns them has another one
        above.
        """
        if self._launch.launch_spec.style != "spawn":
            return self._workers.pids()
        heartbeats = [self._heartbeats.read(local_rank) for local_rank in local_ranks]
        return {heartbeat.local_rank: heartbeat.pid for heartbeat in heartbeats if heartbeat.pid}


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
