"""Run several runs at once on this machine, each with its own agents, as slots become free."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from paceline.contract.claims import local_job_start_name, record_processes
from paceline.contract.verdict import FAILED, read_verdict
from paceline.launch import agents
from paceline.launch.plan.local import LocalPlan

POLL_INTERVAL = 0.05  # seconds


@dataclass
class _ActiveRun:
    plan: LocalPlan
    slot: int
    agents: list[subprocess.Popen[bytes]]

    @property
    def verdict(self) -> str:
        job_start = self.plan.run_path.folder.job_start(local_job_start_name())
        return read_verdict(job_start.verdict) or FAILED


class ParallelRuns:
    """Runs that share a fixed number of slots on this machine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.interrupted = False  # by Ctrl-C
        self.stopping = False  # runs save and stop, and no more are started
        self._active: dict[int, _ActiveRun] = {}

    def run(
        self,
        numbers: list[int],
        *,
        begin: Callable[[int, int], LocalPlan | None],
        end: Callable[[int, str], None],
        stop: Callable[[int], None],
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all of them in order.

        `begin(number, slot)` returns the plan of a run, or None to skip it; `end(number, verdict)`
        is called after it.
        `stop(count)` is called once so many runs have been asked to stop, and `poll()` again and
        again.
        """
        waiting, reported = list(numbers), False
        with self._handle_signals():
            try:
                while waiting or self._active:
                    free = sorted(
                        set(range(self.slots)) - {run.slot for run in self._active.values()}
                    )
                    while waiting and free and not self.stopping:
                        number = waiting.pop(0)
                        plan = begin(number, free[0])
                        if plan is not None:
                            self._active[number] = _ActiveRun(plan, free.pop(0), self._start(plan))
                    if self.stopping:
                        waiting.clear()
                        if self._active and not reported:
                            reported = True
                            stop(len(self._active))
                    for number, run in list(self._active.items()):
                        if run.agents[0].poll() is not None:
                            del self._active[number]
                            agents.wait_for_exit(run.agents[1:])
                            end(number, run.verdict)
                    poll()
                    time.sleep(POLL_INTERVAL)
            finally:
                agents.kill([process for run in self._active.values() for process in run.agents])

    def interrupt(self) -> None:
        """Let all runs save and stop, as Ctrl-C does. The second time, end them at once."""
        self.interrupted = self.stopping = True
        for run in self._active.values():
            for process in run.agents:
                process.send_signal(signal.SIGINT)

    def _start(self, plan: LocalPlan) -> list[subprocess.Popen[bytes]]:
        folder = plan.run_path.folder
        shared = agents.shared_variables(len(plan.agents))
        processes: list[subprocess.Popen[bytes]] = []
        log = os.open(
            folder.slurm_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            for starter in plan.agents:
                processes.append(
                    agents.start_agent(starter, shared, secrets=plan.secrets, output=log)
                )
        except BaseException:
            agents.kill(processes)
            raise
        finally:
            os.close(log)
        record_processes(folder, [os.getpid(), *(process.pid for process in processes)])
        return processes

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Forward Ctrl-C to every agent, and a stop request to every head agent.

        At the first Ctrl-C the runs save and stop. The second one ends them at once.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            self.interrupt()

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True
            for run in self._active.values():
                run.agents[0].send_signal(signal.SIGTERM)

        with agents.handle_signals(interrupt, stop):
            yield
