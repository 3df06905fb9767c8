"""Stops in containers: agents run inside, and Slurm signals processes outside."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.debian13.inside.conftest import CONFIG
from tests.fault_tolerance.runs import SCRIPT, Training, assert_same
from tests.slurm.harness import ENDED, Cluster
from tests.slurm.runs import Paceline
from tests.slurm.test_faults import Submitted, four_undisturbed

__all__ = ["four_undisturbed"]
pytestmark = pytest.mark.timeout(900)
Make = Callable[..., Submitted]


@pytest.fixture
def submitted(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> Make:
    def make(**keys: str) -> Submitted:
        home = tmp_path / "training"
        ours = Submitted(home, cluster, slurm_paceline, **keys)
        ours.script = Path(shutil.copy(SCRIPT, home))
        (home / "paceline.toml").write_text(CONFIG, encoding="utf-8")
        return ours

    return make


@pytest.mark.parametrize("style", ["fork", "srun", "torchrun", "spawn", "mpirun"])
def test_stopped_requeued_and_killed(
    style: str, four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    """Stopped, requeued and resumed, one rank killed and restarted: the weights match an undisturbed run."""
    ours = submitted(gates="step-17", faults="27:3:kill")
    if style == "spawn":
        ours.script_args.append("--spawn")
    ours.submit("--style", style)
    ours.at("step-17", ranks=4)
    ours.interrupt()
    ours.open("step-17")
    ours.completes()
    assert ours.verdicts() == ["stopped", "failed", "done"], ours.logs()
    assert cluster.restarts(ours.job) == 1
    assert_same(ours, four_undisturbed)


@pytest.mark.parametrize("style", ["fork", "mpirun"])
def test_cancelled_stays_cancelled(style: str, submitted: Make, cluster: Cluster) -> None:
    ours = submitted(gates="step-23")
    ours.submit("--style", style)
    ours.at("step-23", ranks=4)
    cluster.run(["scancel", ours.job])
    ours.open("step-23")
    ours.until(lambda: cluster.state(ours.job) in ENDED, "it does not end")
    assert (cluster.state(ours.job), cluster.restarts(ours.job)) == ("CANCELLED", 0)
    assert "done" not in ours.verdicts()
    assert ours.checkpoints(), ours.logs()


def test_preempted_after_a_grace(
    four_undisturbed: Training, submitted: Make, cluster: Cluster
) -> None:
    """Slurm's TERM reaches the agents through the engine."""
    ours = submitted(gates="step-23")
    ours.submit("--partition", "grace")
    ours.at("step-23", ranks=4)
    urgent = cluster.submit("sleep 600", "--partition=high", "--exclusive", "--nodes=4")
    ours.wait_for_stop_request(0)
    ours.open("step-23")
    ours.restarted(1)
    cluster.run(["scancel", urgent])
    ours.completes()
    assert ours.verdicts() == ["stopped", "done"], ours.logs()
    assert_same(ours, four_undisturbed)
