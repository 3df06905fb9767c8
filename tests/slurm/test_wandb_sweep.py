"""A W&B sweep on a real Slurm: agents are tasks of an array, and each two-node run gets one point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.sweep.results import read_sweep
from tests.runtime.trackers.wandb_runs import service_environment
from tests.runtime.trackers.wandb_server import wandb_service
from tests.slurm.harness import Cluster
from tests.slurm.runs import Completed, diagnostics, project, rank_reports
from tests.slurm.sweeps import sweep_of, wait

# What a script of wandb's own does: rank 0 logs. No torch.
SCRIPT = """\
import json, os, sys, wandb
rank = int(os.environ["RANK"])
print("report " + json.dumps({"RANK": rank, "args": sys.argv[1:]}), flush=True)
if rank == 0:
    with wandb.init() as run:
        run.log({"loss": run.config["x"] ** 2})
"""


@pytest.mark.slow
def test_agents_as_tasks(
    cluster: Cluster, slurm_paceline: Callable[..., Completed], tmp_path: Path, scratch: Path
) -> None:
    home = project(scratch.parent / "project", SCRIPT, config='[launch]\nstyle = "srun"\n')
    points = [{"x": 1}, {"x": 2}, {"x": 3}]
    with wandb_service(points, address=cluster.record.controller_address) as service:
        completed = slurm_paceline(
            "sweep",
            "--wandb-sweep",
            "somebody/digits/s1",
            "--parallel",
            "2",
            "--count",
            "2",
            "--nodes",
            "2",
            "--nproc",
            "1",
            "--cpus-per-gpu",
            "1",
            "--time",
            "10m",
            "train.py",
            cwd=home,
            check=True,
            **service_environment(service, tmp_path),
        )
        folder = sweep_of(completed)
        (job,) = folder.read_jobs()
        assert job["tasks"] == {"0": [0, 1], "1": [2, 3]}
        wait(cluster, folder)
    output = "\n".join(diagnostics(folder.trial(number)) for number in range(4))
    sweep = read_sweep(folder)
    # there was no point for the fourth
    assert [trial.state for trial in sweep.trials] == ["done"] * 3, output
    assert sorted(trial.point["x"] for trial in sweep.trials) == [1, 2, 3]
    for trial in sweep.trials:
        reports = rank_reports(trial.folder)
        assert [reports[rank]["args"] for rank in (0, 1)] == [["--x", str(trial.point["x"])]] * 2
    assert {run.sweep for run in service.runs.values()} == {"s1"}
    losses = sorted(run.history()[0]["loss"] for run in service.runs.values())
    assert losses == [1, 4, 9]
    assert {cluster.state(f"{job['job']}_{index}") for index in (0, 1)} == {"COMPLETED"}
