"""A run that a real cluster stops, requeues and restarts is one run in W&B."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.run_folder import STOPPED_EXIT
from tests.runtime.metrics.test_metrics import lines_of
from tests.runtime.trackers.wandb_runs import service_environment, wandb_runs
from tests.runtime.trackers.wandb_server import wandb_service
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline
from tests.slurm.test_faults import Submitted

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_a_requeued_and_restarted_run_keeps_its_id(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    ours = Submitted(
        tmp_path / "training", cluster, slurm_paceline, gates="step-17", faults="27:3:kill"
    )
    ours.submit("--wandb-project", "survivors", "--env", "WANDB_MODE=offline")
    ours.at("step-17", ranks=4)
    ours.interrupt()
    ours.open("step-17")
    ours.restarted(1)
    ours.completes()
    assert ours.verdicts() == ["stopped", "failed", "done"], ours.logs()
    # the second start lost a rank and was ended: W&B's service may have lost all that it had buffered
    runs = [wandb_run for wandb_run in wandb_runs(ours.folder.trackers) if wandb_run.history]
    assert {wandb_run.id for wandb_run in runs} == {ours.folder.path.name}
    assert {wandb_run.project for wandb_run in runs} == {"survivors"}
    assert (runs[0].exit_code, runs[-1].exit_code) == (STOPPED_EXIT, 0), ours.logs()
    lines = lines_of(ours.folder.path)
    first, *_, last = [wandb_run.lines() for wandb_run in runs]
    assert first == lines[: len(first)]
    assert last == lines[-len(last) :]


def test_a_cancelled_run_ends_in_time_and_can_be_sent(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Slurm's SIGTERM reaches every process of the job, including W&B's service; SIGKILL follows soon."""
    ours = Submitted(tmp_path / "training", cluster, slurm_paceline, gates="step-17")
    ours.submit("--wandb-project", "survivors", "--env", "WANDB_MODE=offline")
    ours.at("step-17", ranks=4)
    cluster.run(["scancel", ours.job])
    ours.open("step-17")
    assert cluster.wait(ours.job) == "CANCELLED", ours.logs()
    ours.until(lambda: ours.job not in cluster.queue(), "it stays in the queue")
    assert ours.verdicts() == ["stopped"], ours.logs()
    lines = lines_of(ours.folder.path)
    assert lines[-1]["step"] >= 17
    with wandb_service() as service:
        done = slurm_paceline(
            "sync", str(ours.folder.path), **service_environment(service, tmp_path)
        )
        assert done.returncode == 0, done.stderr
        known = service.runs.get(ours.folder.path.name)
        rows = known.history() if known is not None else []
        shown = [
            {key: value for key, value in row.items() if not key.startswith("_")} for row in rows
        ]
        assert shown == lines[: len(shown)]  # its service may have lost the last ones
