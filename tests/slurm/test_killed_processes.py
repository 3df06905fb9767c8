"""Processes of a running job are killed, as the out-of-memory killer does: the weights stay the same.

Afterwards no process of the job is left, nor anything on the nodes' disks and in their shared memory.
"""

from __future__ import annotations

import glob
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.fault_tolerance.runs import Training, assert_same
from tests.slurm.harness import ENDED, Cluster
from tests.slurm.test_faults import Make, Submitted, four_undisturbed, submitted

__all__ = ["four_undisturbed", "submitted"]
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def command(process: psutil.Process | None) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()) if process is not None else ""
    return ""


def is_zygote(process: psutil.Process) -> bool:
    return "workers.zygote.zygote" in command(process)


def is_agent(process: psutil.Process) -> bool:
    return any(is_zygote(child) for child in process.children()) and not is_zygote(process)


def is_data_worker(process: psutil.Process) -> bool:
    """Whether a rank started it: the zygote forks ranks, which fork the workers of their loaders."""
    return is_zygote(process) and sum(is_zygote(above) for above in process.parents()) == 2


def is_batch_shell(process: psutil.Process) -> bool:
    """Whether it is the shell itself, and no subshell."""
    return command(process).endswith("/slurm_script") and not command(process.parent()).endswith(
        "/slurm_script"
    )


def variable(process: psutil.Process, name: str) -> str:
    return process.environ().get(name, "")


KINDS: dict[str, Callable[[psutil.Process], bool]] = {
    "member agent": lambda each: is_agent(each) and variable(each, "SLURM_PROCID") == "1",
    "zygote": lambda each: (
        is_zygote(each) and not any(is_zygote(above) for above in each.parents())
    ),
    "data-loader worker": is_data_worker,
}  # `test_killed_agents` kills the head agent, and `test_faults` a rank


def kill_one(ours: Submitted, matches: Callable[[psutil.Process], bool]) -> None:
    found: list[Any] = []

    def find() -> bool:
        for each in ours.cluster.processes(ours.job):
            with suppress(psutil.Error):
                if matches(each):
                    found.append(each)
        return bool(found)

    ours.until(find, "there is no such process")
    found[-1].send_signal(signal.SIGKILL)


def check_nothing_is_left(ours: Submitted) -> None:
    ours.until(lambda: not ours.cluster.processes(ours.job), "processes are left running")
    left = [
        path
        for base in ("/tmp", "/dev/shm")
        for path in glob.glob(f"{base}/paceline-*/*{ours.run.path.name}*")
    ]
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process(
    kind: str, four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    ours = submitted(gates="step-17")
    if KINDS[kind] is is_data_worker:
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


def test_a_killed_tracker_service(
    four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    """Training goes on, with one warning."""
    ours = submitted(gates="step-17")
    ours.submit("--wandb-project", "survivors", "--env", "WANDB_MODE=offline")
    ours.at("step-17", ranks=4)
    kill_one(ours, lambda each: each.name().startswith("wandb-core"))
    ours.open("step-17")
    ours.completes()
    assert ours.verdicts() == ["done"], ours.logs()
    assert_same(ours, four_undisturbed)
    assert "W&B gets no more values" in ours.logs()
    check_nothing_is_left(ours)


def test_a_killed_batch_shell(
    four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    """Slurm fails the job and ends its step. The agents ask the ranks to save; whether they do or not, it can go on."""
    ours = submitted(gates="step-17")
    ours.submit()
    ours.at("step-17", ranks=4)
    kill_one(ours, is_batch_shell)
    ours.wait_for_stop_request(0)
    ours.open("step-17")
    ours.until(lambda: cluster.state(ours.job) in ENDED, "it does not end")
    assert (cluster.state(ours.job), cluster.restarts(ours.job)) == ("FAILED", 0), ours.logs()
    check_nothing_is_left(ours)
    run = ours.folder.path.name
    shown = ours.paceline("show", run, cwd=ours.home).stdout
    # failed: they could not save
    assert re.search(r"\b(stopped|failed) \(the batch shell was killed", shown), shown
    assert f"continue   paceline submit --resume {run}  (" in shown
    done = ours.paceline("submit", "--resume", run, cwd=ours.home)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    ours.job = ours.folder.job.read_text().strip()
    ours.completes()
    assert_same(ours, four_undisturbed)
    check_nothing_is_left(ours)
