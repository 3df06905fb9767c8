"""A stop request as the ranks of a node get it: the signals, the deadline, and what a script can do about them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Iterable

from paceline.agent.health.heartbeat import Heartbeat, Heartbeats
from paceline.agent.workers import fork_safety, processes
from paceline.agent.workers.group import Launch, WorkerGroup
from paceline.contract.heartbeat_file import READY, RUNNING
from paceline.contract.run_folder import RunFolder

LOST = "cannot save: progress since the script's own last checkpoint is lost"
MARGIN = 10.0  # seconds before the time limit, to write the verdict and requeue the job
TERM_SHARE = 0.5  # of the timeout, for a script with a handler of SIGUSR1, which may only print stacks


class StopRequest:
    """Signals each rank once it can take a signal, and again when its runtime listens.

    A request that must end the ranks has a deadline: by SIGTERM to any agent, or because the run was cancelled or is
    requeued in any case. The others come from a batch script with its own time limit.
    """

    def __init__(self, launch: Launch, *, workers: WorkerGroup, heartbeats: Heartbeats) -> None:
        self._launch_spec, self._workers, self._heartbeats = launch.launch_spec, workers, heartbeats
        self._cancelled = RunFolder(launch.attempt.path.parent).cancelled
        self.timeout = launch.launch_spec.stop_timeout
        self.requested = False
        self._by_term = False
        self._term_time = self._deadline = math.inf
        self._signalled: dict[int, int] = {}  # pid -> its state when it last got SIGUSR1
        self._terminated: set[int] = set()  # those that got SIGTERM

    def is_news(self, *, by_term: bool) -> bool:
        """Whether a request adds to what is known: it is the first, or the first by SIGTERM."""
        return not self.requested or (by_term and not self._by_term)

    def start(self, *, by_term: bool) -> None:
        self.requested = True
        self._heartbeats.request_stop()
        if by_term and not self._by_term:
            self._by_term = True

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self._deadline

    def signal_ranks(self, local_ranks: Collection[int]) -> None:
        """Send SIGUSR1. Ranks without a runtime also get SIGTERM if they must end all the same."""
        with_term = self._must_end()
        if with_term and self._deadline == math.inf:
            self._set_deadline()
        for pid, state in self._states(local_ranks).items():
            if not READY <= state <= RUNNING:
                continue
            # A script that saves on SIGUSR1 gets time to do so: SIGTERM would end it meanwhile.
            may_term = time.monotonic() > self._term_time or not _may_save_on_usr1(pid)
            on_term = with_term and state == READY and may_term
            if self._signalled.get(pid, 0) < state:
                self._signalled[pid] = state
                processes.send_signal(pid, signal.SIGUSR1)
            if on_term:
                self._terminate(self._workers.pids().values() if self._spawns else [pid])

    def has_terminated(self, heartbeat: Heartbeat) -> bool:
        """Whether a rank without the runtime, or the process that started it, got SIGTERM."""
        got_term = heartbeat.pid in self._terminated or (self._spawns and bool(self._terminated))
        return got_term and heartbeat.state <= READY

    def reaches(self, local_ranks: Collection[int]) -> bool:
        """Whether all ranks can take signals."""
        return all(self._heartbeats.read(local_rank).pid for local_rank in local_ranks) or (
            self._spawns and bool(self._states(local_ranks))
        )

    def describe(self, local_ranks: Collection[int]) -> list[str]:
        """Return what the ranks will do, one console note per line."""
        states = self._states(local_ranks)
        if RUNNING in states.values() or fork_safety.uses_runtime(self._launch_spec):
            return ["the ranks save and stop"]
        if any(processes.has_handler(pid, signal.SIGUSR1) for pid in states):
            return ["the script handles SIGUSR1 itself"]
        if self._must_end():
            caught = any(processes.has_handler(pid, signal.SIGTERM) for pid in states)
            return ["the script handles SIGTERM itself" if caught else LOST]
        return [
            f"the script runs until the time limit, and {LOST}",
            'if it resumes by itself, requeue it with --requeue-always (requeue = "always")',
        ]

    @property
    def _spawns(self) -> bool:
        return self._launch_spec.style == "spawn"

    def _must_end(self) -> bool:
        """Whether a script that takes no stop request must end all the same: somebody ended or cancelled the run."""
        return self._by_term or self._launch_spec.requeue_always or self._cancelled.exists()

    def _set_deadline(self) -> None:
        if self._launch_spec.requeue_always and not self._by_term:
            # The time limit is `stop_timeout` away, and the ranks must have ended by then.
            margin = min(self._launch_spec.kill_after + MARGIN, self.timeout / 2)
            self.timeout -= margin
        now = time.monotonic()
        self._term_time, self._deadline = now + TERM_SHARE * self.timeout, now + self.timeout

    def _states(self, local_ranks: Collection[int]) -> dict[int, int]:
        """Map processes to their states. A process that starts the ranks itself counts if they have no slots."""
        heartbeats = [self._heartbeats.read(local_rank) for local_rank in local_ranks]
        states = {heartbeat.pid: heartbeat.state for heartbeat in heartbeats if heartbeat.pid}
        if not states and self._spawns:
            states = dict.fromkeys(self._workers.pids().values(), READY)
        return states

    def _terminate(self, pids: Iterable[int]) -> None:
        """Send SIGTERM, once. A process that starts the ranks itself passes it on, or ends with them."""
        for pid in set(pids) - self._terminated:
            self._terminated.add(pid)
            processes.send_signal(pid, signal.SIGTERM)


def _may_save_on_usr1(pid: int) -> bool:
    return processes.has_handler(pid, signal.SIGUSR1) and not processes.has_handler(pid, signal.SIGTERM)
