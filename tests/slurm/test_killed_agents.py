"""An agent that is killed on a real cluster: the batch script starts the agents again."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.contract.run_folder import read_verdict
from tests.adversary.test_killed_agents import KILLS
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "node", ["0", pytest.param("1", marks=pytest.mark.slow)], ids=["head", "member"]
)
def test_a_killed_agent_on_two_nodes(
    node: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", KILLS)
    done = slurm_paceline(
        "submit",
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--time",
        "10m",
        "--wait",
        "train.py",
        "1",
        node,
        cwd=home,
        timeout=250,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    assert [read_verdict(attempt.verdict) for attempt in folder.attempts()] == ["failed", "done"]
    assert "attempt 2 is complete" in folder.attempt(2).log(1).read_text()
    # In the same allocation, with the same nodes.
    assert [job_start.path.name.partition("-")[2] for job_start in folder.job_starts()] == ["0"]
    assert "an agent was killed; starting the agents again" in folder.slurm_log.read_text()


STAGED = """\
import os
from pathlib import Path
data = Path(os.environ["PACELINE_DATA"])
assert (data / "set" / "inner" / "1").read_text() == "1"
if os.environ["PACELINE_ATTEMPT"] == "1":
    (data / "out").write_text(os.environ["RANK"])
"""


@pytest.mark.usefixtures("without_torch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "keep", ["", pytest.param('\nkeep = "2h"', marks=pytest.mark.slow)], ids=["", "keep"]
)
def test_data_is_staged_again_and_results_stay_if_an_agent_is_killed(
    keep: str, tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    config = (
        '[project]\nname = "p"\n[data]\nstage = ["set"]\ncollect = ["out"]\n'
        f'folder = "{tmp_path}/disks/$SLURMD_NODENAME"{keep}\n'
    )
    home = project(tmp_path / "project", STAGED + KILLS, config=config)
    (scratch / "p" / "set" / "inner").mkdir(parents=True)
    (scratch / "p" / "set" / "inner" / "1").write_text("1")
    args = ["--nodes", "2", "--nproc", "1", "--cpu", "--time", "10m", "--wait", "train.py"]
    done = slurm_paceline("submit", *args, "1", "0", cwd=home, timeout=250)
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    assert "attempt 2 is complete" in folder.attempt(2).log(1).read_text()
    found = {str(path.relative_to(folder.collected)) for path in folder.collected.rglob("out")}
    assert found == {"node-0/out", "node-1/out"}, diagnostics(folder, done)
    assert not list((tmp_path / "disks").rglob("run-*"))
