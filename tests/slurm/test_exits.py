"""How runs of several nodes end if their ranks do not end together. The script doesn't use the runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.runs import Paceline, diagnostics, project, run_of

SCRIPT = """\
import json, os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
"""

# Rank 1 sends SIGTERM to the agent of its own node.
STOPS = """
if dist.get_rank() == 1:
    with open(os.path.join(os.environ["PACELINE_RUN"], "events", "agent-1.jsonl")) as file:
        agent = next(event for event in map(json.loads, file) if event["event"] == "started")
    os.kill(agent["pid"], signal.SIGTERM)
while True:
    dist.all_reduce(total)
"""

LINGERS = """
dist.destroy_process_group()
if os.environ["RANK"] == "1":
    time.sleep(3600)
"""


def test_sigterm_to_one_agent_stops_all_nodes(tmp_path: Path, slurm_paceline: Paceline) -> None:
    home = project(tmp_path / "project", SCRIPT + STOPS)
    args = (
        "--nodes",
        "2",
        "--gpus",
        "1",
        "--cpu",
        "--time",
        "10m",
        "--no-requeue",
        "--wait",
        "train.py",
    )
    done = slurm_paceline("submit", *args, cwd=home, timeout=300)
    folder = run_of(done)
    assert folder.attempt(1).verdict.read_text() == "stopped\n", diagnostics(folder, done)
    assert done.returncode != 0
    assert not any(job_start.requeue.exists() for job_start in folder.job_starts())


@pytest.mark.slow
def test_ranks_that_linger_on_another_node_are_ended(
    tmp_path: Path, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", SCRIPT + LINGERS, config='[resume]\nexit_timeout = "3s"\n')
    args = ("--nodes", "2", "--gpus", "1", "--cpu", "--time", "10m", "--wait", "train.py")
    done = slurm_paceline("submit", *args, cwd=home, timeout=300)
    folder = run_of(done)
    assert folder.attempt(1).verdict.read_text() == "failed\n", diagnostics(folder, done)
    failure = json.loads(folder.attempt(1).failure.read_text())
    assert (failure["cause"], failure["rank"]) == ("lingered", 1)
    assert "train.py" in failure["traceback"]
    assert not folder.attempt(2).path.exists()
