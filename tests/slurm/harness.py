"""A sandbox for tests: submit jobs, wait for them, and clean up after each test."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.tools.sandbox import Sandbox, daemons
from paceline.tools.sandbox.settings import SandboxPaths, SandboxRecord

ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class Cluster(Sandbox):
    def submit(self, script: str, *options: str, output: Path | str = "/dev/null") -> str:
        """Submit the text of a batch script and return its job id. `#!/bin/bash` is added if missing."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
        done = self.run(["sbatch", "--parsable", f"--output={output}", *options], input=text)
        return done.stdout.strip().partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`, for an array of one task (`7_2`); empty if the job is unknown."""
        done = self.run(["scontrol", "show", "job", "--oneliner", job], check=False)
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def state(self, job: str) -> str:
        """Return `PENDING`, `RUNNING`, `COMPLETED`, ..., or an empty string if the job is unknown."""
        return self.show(job).get("JobState", "")

    def restarts(self, job: str) -> int:
        return int(self.show(job).get("Restarts", "0"))

    def wait(self, job: str, states: Collection[str] | str = ENDED, timeout: float = 120) -> str:
        """Wait until a job is in one of these states, and return it."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            assert time.monotonic() < deadline, (
                f"job {job} is {state}, not {sorted(wanted)}, after {timeout} s"
            )
            time.sleep(0.2)
        return state

    def queue(self) -> list[str]:
        """Return the ids of all jobs that are pending, running or completing."""
        return self.run(["squeue", "-h", "-o", "%A"]).stdout.split()

    def processes(self, job: str) -> list[psutil.Process]:
        """Return a job's live processes. Another cluster on this machine may have a job with the same number."""
        mine = {"SLURM_JOB_ID": job, "SLURM_CONF": self.environment["SLURM_CONF"]}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    mine.items() <= process.environ().items()
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def repair(self, *, timeout: float = 90.0) -> None:
        """Undo every fault: start the controller and all nodes, reconnect them and wait until they accept jobs."""
        if not self.is_running("slurmctld"):
            self.restart_controller(timeout=timeout)
        for name in self.nodes:
            if not self.is_running(name):
                daemons.start_node(self.paths, self.record, name)
            elif self.is_cut(name):
                self.heal(name)
        self.wait_ready(timeout=timeout)

    def clear(self, timeout: float = 90) -> None:
        """Cancel all jobs, undo every fault and wait until all nodes are idle."""
        self.repair(timeout=timeout)
        deadline = time.monotonic() + timeout
        while left := self.queue():
            assert time.monotonic() < deadline, f"jobs cannot be cancelled: {left}"
            self.run(["scancel", "--quiet", *left], check=False)
            self.repair(timeout=timeout)
            time.sleep(0.2)
        while any(node.state != "idle" for node in self.states().values()):
            assert time.monotonic() < deadline, (
                f"nodes are not idle: {self.run(['sinfo', '-N', '-l']).stdout}"
            )
            self.repair(timeout=timeout)
            time.sleep(0.2)


def is_orphaned(folder: Path) -> bool:
    """Return whether a sandbox is running in this folder for a process that has ended."""
    record = SandboxRecord.load(SandboxPaths(folder))
    return record is not None and record.owner is not None and not record.owner.alive()
