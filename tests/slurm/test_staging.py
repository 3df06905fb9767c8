"""Data on a real Slurm: staged on two nodes and used again, results back after a cancel, nothing left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.contract import RunFolder
from paceline.node.staging.folders import Owner, make_run_folder, private_folder
from tests.slurm.harness import Cluster
from tests.slurm.runs import Type, everything, project, run_of

pytestmark = pytest.mark.timeout(600)
PATIENCE = 400
SMALL = ("--style", "srun", "--gpus", "1", "--cpu", "--time", "10m", "--cpus-per-gpu", "1", "--nodes", "2")

SCRIPT = """\
import os, sys, time
from pathlib import Path
data, rank = Path(os.environ["PACELINE_DATA"]), os.environ["RANK"]
assert sum(path.is_file() for path in (data / "set").rglob("*")) == 100
assert (data / "set").stat().st_uid == os.geteuid()
(data / "out").mkdir(exist_ok=True)
(data / "out" / "result.txt").write_text(rank)
print("ready", flush=True)
if sys.argv[1:] == ["wait"]:
    time.sleep(600)
"""


def staged(folder: RunFolder) -> list[dict[str, Any]]:
    lines = [line for path in folder.events.glob("launcher-*") for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == "staged"]


def results(folder: RunFolder) -> dict[str, str]:
    paths = folder.collected.rglob("*.txt")
    return {str(path.relative_to(folder.collected)): path.read_text() for path in paths}


def test_staged_on_two_nodes_cancelled_collected_and_used_again(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Type
) -> None:
    config = (
        '[project]\nname = "p"\n[data]\nstage = ["set"]\ncollect = ["out/*.txt"]\nkeep = "2h"\n'
        f'folder = "{tmp_path}/disks/$SLURMD_NODENAME"\n'
    )
    home = project(tmp_path / "project", SCRIPT, config=config)

    missing = slurm_paceline("submit", *SMALL, "train.py", cwd=home)
    assert missing.returncode == 2
    assert f"there is no '{scratch / 'p' / 'set'}'" in missing.stderr

    for number in range(100):
        path = scratch / "p" / "set" / f"class {number % 3}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * number)

    first = run_of(slurm_paceline("submit", *SMALL, "--no-requeue", "train.py", "wait", cwd=home, check=True))
    job = first.job.read_text().strip()
    deadline = time.monotonic() + PATIENCE
    logs = [first.attempt(1).log(rank) for rank in (0, 1)]
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert time.monotonic() < deadline, everything(first)
        assert cluster.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), everything(first)
        time.sleep(0.2)
    assert [event["files"] for event in staged(first)] == [100, 100]
    nodes = sorted(path.name for path in (tmp_path / "disks").iterdir())
    assert len(nodes) == 2
    cluster.run(["scancel", job])
    assert cluster.wait(job, timeout=PATIENCE) == "CANCELLED"

    again = slurm_paceline(
        "submit", *SMALL, "--nodelist", ",".join(nodes), "--wait", "train.py", cwd=home, timeout=PATIENCE
    )
    second = run_of(again)
    assert again.returncode == 0, everything(second, again)
    assert [(event["files"], event["reused"]) for event in staged(second)] == [(0, 4950), (0, 4950)]
    expected = {"node-0/out/result.txt": "0", "node-1/out/result.txt": "1"}
    assert results(second) == expected, everything(second, again)
    # Collected within the grace of the cancel; where the machine was too slow for that, by the next run's sweep.
    assert results(first) == expected, everything(first)
    for node in nodes:
        assert sorted(path.name for path in (tmp_path / "disks" / node).glob("paceline-*/*")) == ["kept"]


def test_clean_on_a_node_spares_what_lives(tmp_path: Path, cluster: Cluster, slurm_paceline: Type) -> None:
    """One job was killed and left its folder; another one, which still runs, has its own beside it."""
    live = cluster.submit("sleep 600", "--nodes=1", "--ntasks=1", "--cpus-per-task=1")
    cluster.wait(live, "RUNNING", timeout=PATIENCE)
    node = cluster.show(live)["NodeList"]
    private = private_folder(tmp_path)
    for job in (live, "999999"):
        owner = Owner(run="r", leg=f"{job}-0", node=0, host=node, job=job)
        make_run_folder(private / f"run-{job}", owner)
    words = ("clean", "--node", node, "--folder", str(tmp_path))
    shown = slurm_paceline(*words, check=True, timeout=PATIENCE)
    assert "run-999999  (job 999999 is over)" in shown.stdout
    assert f"run-{live}" not in shown.stdout
    assert len(list(private.iterdir())) == 2
    slurm_paceline(*words, "--yes", check=True, timeout=PATIENCE)
    assert [path.name for path in private.iterdir()] == [f"run-{live}"]
