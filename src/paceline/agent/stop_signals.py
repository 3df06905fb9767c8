"""Stop requests as the ranks of a node get them: the signals, and what a script can do about them."""

from __future__ import annotations

import signal
from collections.abc import Collection

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.workers import fork_safety, processes
from paceline.agent.workers.group import WorkerGroup
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.launch_spec import LaunchSpec

LOST = "cannot save: progress since the script's own last checkpoint is lost"


class StopSignals:
    """Signals each rank once it can take a signal, and again when its runtime listens."""

    def __init__(self, launch_spec: LaunchSpec, *, workers: WorkerGroup, heartbeats: Heartbeats) -> None:
        self._launch_spec, self._workers, self._heartbeats = launch_spec, workers, heartbeats
        self._signalled: dict[int, int] = {}  # pid -> its state when it last got SIGUSR1
        self._terminated: set[int] = set()  # those that got SIGTERM

    def send(self, local_ranks: Collection[int], *, with_term: bool) -> None:
        """Send SIGUSR1; ranks without a runtime also get SIGTERM if `with_term` is true."""
        for pid, state in self._states(local_ranks).items():
            if not READY <= state <= RUNNING:
                continue
            # One signal is enough for a script that saves on SIGUSR1: SIGTERM would end it while it does.
            on_term = with_term and state == READY and not _saves_on_usr1(pid)
            if self._signalled.get(pid, 0) < state:
                self._signalled[pid] = state
                processes.send_signal(pid, signal.SIGUSR1)
            if on_term and pid not in self._terminated:
                self._terminated.add(pid)
                processes.send_signal(pid, signal.SIGTERM)

    def describe(self, local_ranks: Collection[int], *, with_term: bool) -> list[str]:
        """Return what the ranks will do, one console note per line."""
        states = self._states(local_ranks)
        if RUNNING in states.values() or fork_safety.uses_runtime(self._launch_spec):
            return ["the ranks save and stop"]
        if any(processes.has_handler(pid, signal.SIGUSR1) for pid in states):
            return ["the script handles SIGUSR1 itself"]
        if with_term:
            caught = any(processes.has_handler(pid, signal.SIGTERM) for pid in states)
            return ["the script handles SIGTERM itself" if caught else LOST]
        return [
            f"the script runs until the time limit, and {LOST}",
            'if it resumes by itself, requeue it with --requeue-always (requeue = "always")',
        ]

    def _states(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Map processes to their states. A process that starts the ranks itself counts if they have no slots."""
        heartbeats = [self._heartbeats.read(local_rank) for local_rank in local_ranks]
        states = {heartbeat.pid: heartbeat.state for heartbeat in heartbeats if heartbeat.pid}
        if not states and self._launch_spec.style == "spawn":
            states = dict.fromkeys(self._workers.pids().values(), READY)
        return states


def _saves_on_usr1(pid: int) -> bool:
    return processes.has_handler(pid, signal.SIGUSR1) and not processes.has_handler(pid, signal.SIGTERM)
