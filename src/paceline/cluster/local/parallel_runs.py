"""Several runs at once on this machine: as many as there is room for, each with agents of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline.cluster.local import agents
from paceline.contract.verdict import FAILED, read_verdict
from paceline.plan.local import LocalPlan

POLL = 0.05  # seconds


@dataclass
class _Going:
    plan: LocalPlan
    slot: int
    processes: list[subprocess.Popen[bytes]]


class ParallelRuns:
    """`begin` is called for each run when a slot is free for it, `end` when it is over, with its verdict."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.interrupted = False  # Ctrl-C
        self.stopping = False  # asked to save and stop: nothing more is begun
        self._going: dict[Any, _Going] = {}

    def run(
        self,
        names: list[int],
        *,
        begin: Callable[[int, int], LocalPlan | None],
        end: Callable[[int, str], None],
    ) -> None:
        """All of them, in their order. `begin(name, slot)` may refuse one by None."""
        waiting = list(names)
        with self._handle_signals():
            try:
                while waiting or self._going:
                    free = sorted(set(range(self.slots)) - {each.slot for each in self._going.values()})
                    while waiting and free and not self.stopping:
                        name = waiting.pop(0)
                        plan = begin(name, free[0])
                        if plan is not None:
                            self._going[name] = _Going(plan, free.pop(0), self._start(plan))
                    if self.stopping:
                        waiting.clear()
                    for name in [
                        name for name, each in self._going.items() if each.processes[0].poll() is not None
                    ]:
                        each = self._going.pop(name)
                        agents.wait_for_exit(each.processes[1:])
                        end(
                            name,
                            read_verdict(each.plan.run_path.folder.job_start(agents.job_start_name()).verdict)
                            or FAILED,
                        )
                    time.sleep(POLL)
            finally:
                agents.kill([process for each in self._going.values() for process in each.processes])

    def _start(self, plan: LocalPlan) -> list[subprocess.Popen[bytes]]:
        folder = plan.run_path.folder
        shutil.rmtree(folder.job_start(agents.job_start_name()).path, ignore_errors=True)
        folder.job_start(agents.job_start_name()).path.mkdir(parents=True)
        shared = agents.shared_variables(len(plan.agents))
        processes: list[subprocess.Popen[bytes]] = []
        log = os.open(folder.slurm_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            for starter in plan.agents:
                processes.append(agents.start_agent(starter, shared, secrets=plan.secrets, output=log))
        except BaseException:
            agents.kill(processes)
            raise
        finally:
            os.close(log)
        return processes

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Ctrl-C goes to every agent, a request to stop to every head."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self.interrupted = self.stopping = True
            for each in self._going.values():
                for process in each.processes:
                    process.send_signal(signal.SIGINT)

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True
            for each in self._going.values():
                each.processes[0].send_signal(signal.SIGTERM)

        with agents.handle_signals(interrupt, stop):
            yield
