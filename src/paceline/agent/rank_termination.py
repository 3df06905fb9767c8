"""How an agent ends the ranks of its node when one has failed, or when the run is over."""

from __future__ import annotations

import signal
import time

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.workers import process_tree
from paceline.agent.workers.started_ranks import StartedRanks
from paceline.contract.heartbeat_file import RUNNING

# seconds; a rank that uses the runtime ends at once on SIGTERM, unless it is stuck in C
RUNTIME_KILL_AFTER = 1.0


class Termination:
    """Ends the ranks of this node: SIGTERM first, then SIGKILL to the process group of each that
    remains.
    """

    def __init__(self, workers: StartedRanks, heartbeats: Heartbeats, *, kill_after: float) -> None:
        self._workers = workers
        self._heartbeats = heartbeats
        self._kill_after = kill_after
        self.since: float | None = None
        self.killed: set[int] = set()  # local ranks

    @property
    def started(self) -> bool:
        return self.since is not None

    def start(self) -> None:
        if self.since is not None:
            return
        self.since = time.monotonic()
        self._heartbeats.mark_terminating()
        for pid in self._workers.pids().values():
            process_tree.send_signal(pid, signal.SIGTERM)

    def kill_now(self) -> None:
        """Skip the time between SIGTERM and SIGKILL."""
        self.start()
        self._kill_after = 0.0
        self.tick()

    def tick(self) -> None:
        """Kill the ranks whose time is up."""
        if self.since is None:
            return
        waited = time.monotonic() - self.since
        for local_rank, pid in self._workers.pids().items():
            uses_runtime = self._heartbeats.read(local_rank).state >= RUNNING
            kill_after = (
                min(self._kill_after, RUNTIME_KILL_AFTER) if uses_runtime else self._kill_after
            )
            if waited >= kill_after:
                self.killed.add(local_rank)
                process_tree.signal_group(pid, signal.SIGKILL)
                process_tree.send_signal(pid, signal.SIGKILL)
