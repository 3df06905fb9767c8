"""Each node of a job is sampled once, however many agents run on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, project, run_of

pytestmark = pytest.mark.timeout(600)
HELD = 60_000_000

# Ends when both nodes have samples.
WAITING = f"""\
import os, pathlib, time
held = bytearray({HELD})
paths = [pathlib.Path(os.environ["PACELINE_RUN"], "system", f"node-{{node}}.jsonl") for node in (0, 1)]
deadline = time.monotonic() + 120
while time.monotonic() < deadline and not all(path.exists() and path.read_text().count("\\n") > 3 for path in paths):
    time.sleep(0.2)
"""


@pytest.mark.parametrize("style", ["srun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_one_file_per_node(
    style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", WAITING, config='[runtime]\nsystem_metrics = "1s"\n')
    done = slurm_paceline(
        "submit",
        "--style",
        style,
        "--nodes",
        "2",
        "--nproc",
        "2",
        "--cpu",
        "--time",
        "10m",
        "--wait",
        "train.py",
        cwd=home,
        timeout=400,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    assert sorted(path.name for path in folder.system.iterdir()) == ["node-0.jsonl", "node-1.jsonl"]
    hosts = set()
    for node in (0, 1):
        lines = [json.loads(line) for line in folder.node_metrics(node).read_text().splitlines()]
        hosts.add(lines[0]["host"])
        assert all("cpu" in line for line in lines[1:])
        assert max(line["own_memory"] for line in lines[1:]) > 2 * HELD, (
            "counts both ranks, including the other agent's"
        )
    assert len(hosts) == 2
    shown = slurm_paceline("show", str(folder.path), check=True).stdout
    assert all(f"{host} · CPU" in shown for host in hosts)
