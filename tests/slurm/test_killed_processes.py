"""Processes of a running job are killed, as the out-of-memory killer does: the weights stay the same.

Afterwards no process of the job is left, nor anything on the nodes' disks and in their shared memory.
"""

from __future__ import annotations

import glob
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.fault_tolerance.runs import Training, assert_same
from tests.slurm.harness import Cluster
from tests.slurm.test_faults import Make, Submitted, four_undisturbed, submitted

__all__ = ["four_undisturbed", "submitted"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def processes_of(job: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def command(process: psutil.Process | None) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()) if process is not None else ""
    return ""


def is_zygote(process: psutil.Process) -> bool:
    return "workers.zygote.zygote" in command(process)


def is_agent(process: psutil.Process) -> bool:
    return any(is_zygote(child) for child in process.children()) and not is_zygote(process)


def variable(process: psutil.Process, name: str) -> str:
    return process.environ().get(name, "")


KINDS: dict[str, Callable[[psutil.Process], bool]] = {
    "member agent": lambda each: is_agent(each) and variable(each, "SLURM_PROCID") == "1",
    "zygote": lambda each: is_zygote(each) and not any(is_zygote(above) for above in each.parents()),
}  # `test_killed_agents` kills the head agent, and `test_faults` a rank


def kill_one(ours: Submitted, matches: Callable[[psutil.Process], bool]) -> None:
    found: list[Any] = []

    def find() -> bool:
        for each in processes_of(ours.job):
            with suppress(psutil.Error):
                if matches(each):
                    found.append(each)
        return bool(found)

    ours.until(find, "there is no such process")
    found[-1].send_signal(signal.SIGKILL)


def check_nothing_is_left(ours: Submitted) -> None:
    ours.until(lambda: not processes_of(ours.job), f"left running: {[command(p) for p in processes_of(ours.job)]}")
    left = [path for base in ("/tmp", "/dev/shm") for path in glob.glob(f"{base}/paceline-*/*{ours.run.path.name}*")]
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process(kind: str, four_undisturbed: Training, submitted: Make, cluster: Cluster) -> None:
    ours = submitted(gates="step-17")
    ours.script_args += ["--workers", "1"]
    ours.submit()
    ours.at("step-17", ranks=4)
    kill_one(ours, KINDS[kind])
    ours.until(lambda: len(ours.run.attempts()) > 1, "there is no second attempt")
    ours.open("step-17")
    ours.completes()
    assert cluster.restarts(ours.job) == 0, ours.logs()  # it went on in the same allocation
    assert ours.verdicts() == ["failed", "done"], ours.logs()
    assert_same(ours, four_undisturbed)
    check_nothing_is_left(ours)
