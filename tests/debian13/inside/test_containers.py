"""Jobs in containers on two nodes: every style, and what ranks see of the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.debian13.inside.conftest import CONFIG, IMAGE
from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, SPAWNING, Paceline, diagnostics, project, rank_reports, run_of

PROFILES = """
[profiles.over.launch]
mpirun_over = "torchrun"
[profiles.one.launch]
gpu_binding = "one"
"""

# Prints its rank, then sums over all ranks, in containers on two nodes.
SUMMING = (
    PLAIN
    + """
import shutil
import paceline, torch
assert os.path.exists("/etc/apt/sources.list") and not shutil.which("scontrol"), "this is the image"
with paceline.session(cpu=True) as run:
    total = run.sum(torch.ones(1))
    assert int(total) == run.world_size, total
print("met", paceline.__file__, flush=True)
"""
)

STYLES = {
    "fork": ["--style", "fork"],
    "srun": ["--style", "srun"],
    "torchrun": ["--style", "torchrun"],
    "spawn": ["--style", "spawn"],
    "mpirun": ["--style", "mpirun"],
    "mpirun-torchrun": ["--style", "mpirun", "--cluster-profile", "over"],
    "lightning": ["--style", "lightning"],
    "accelerate": ["--style", "accelerate"],
    "srun-one-gpu-each": ["--style", "srun", "--cluster-profile", "one"],
}


@pytest.mark.parametrize("style", STYLES)
def test_style(style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    home = project(tmp_path / "project", SUMMING, config=CONFIG + PROFILES)
    script = "train.py"
    if style == "spawn":
        script = "spawning.py"
        (home / script).write_text(SPAWNING.format(path=str(home / "train.py")), encoding="utf-8")
    done = slurm_paceline(
        "submit",
        *STYLES[style],
        "--nodes",
        "2",
        "--gpus",
        "2",
        "--cpu",
        "--time",
        "10m",
        "--wait",
        script,
        cwd=home,
        timeout=250,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    ranks = rank_reports(folder)
    assert sorted(ranks) == [0, 1, 2, 3], diagnostics(folder, done)
    assert len({each["host"] for each in ranks.values()}) == 2
    logs = [path.read_text() for path in folder.attempt(1).path.glob("rank-*.log")]
    assert sum(log.count("\nmet ") for log in logs) == 4, diagnostics(folder, done)
    for rank, each in ranks.items():
        assert each["gpus"] == (str(rank % 2) if style == "srun-one-gpu-each" else "0,1")
    assert list(Path.home().iterdir()) == [], "nothing was written to the home folder"


SURROUNDINGS = (
    PLAIN
    + """
import shutil
from pathlib import Path
data = Path(os.environ["PACELINE_DATA"])
seen = {"staged": (data / "numbers").read_text(), "data": str(data), "extra": Path("/extra/word").read_text()}
seen["home"] = sys.path
(data / "results").mkdir()
(data / "results" / f"rank-{os.environ['RANK']}").write_text("result")
print("seen " + json.dumps(seen), flush=True)
"""
)


def test_what_ranks_see(
    tmp_path: Path, scratch: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Data on a disk of the node, results brought back, folders of the user's, variables with any character."""
    odd = "a,b \"c\"\n'd' $e `f` \\g"
    (scratch / "project").mkdir(parents=True)
    (scratch / "project" / "numbers").write_text("1 2 3")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "word").write_text("hello")
    config = (
        CONFIG
        + f"""\
binds = ["{tmp_path}/extra:/extra:ro"]
variables = {{ ODD = {json.dumps(odd)}, CUDA_DEVICE_ORDER = "PCI_BUS_ID" }}
[data]
stage = ["numbers"]
collect = ["results/*"]
folder = "{tmp_path}/disk of $SLURMD_NODENAME/made/now"
"""
    )
    home = project(tmp_path / "project", SURROUNDINGS, config=config)
    for node in (1, 2):
        (tmp_path / f"disk of node{node}").mkdir()
    done = slurm_paceline(
        "submit",
        "--nodes",
        "2",
        "--gpus",
        "1",
        "--nodelist",
        "node[1-2]",
        "--cpu",
        "--time",
        "10m",
        "--wait",
        "train.py",
        cwd=home,
        timeout=250,
    )
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    for rank, each in rank_reports(folder).items():
        log = folder.attempt(1).log(rank).read_text(encoding="utf-8")
        seen = json.loads(
            next(line for line in log.splitlines() if line.startswith("seen ")).removeprefix(
                "seen "
            )
        )
        assert seen["staged"] == "1 2 3"
        assert seen["data"].startswith(f"{tmp_path}/disk of node{rank + 1}/made/now/")
        assert not Path(seen["data"]).exists(), "it is removed in the end"
        assert seen["extra"] == "hello"
        assert each["environ"]["ODD"] == odd
        assert each["environ"]["CUDA_VISIBLE_DEVICES"] == "0"
        assert each["cwd"] == str(folder.work / home.name)
    results = sorted(path.name for path in folder.path.glob("**/results/rank-*"))
    assert results == ["rank-0", "rank-1"], diagnostics(folder, done)


# What is wrong: the script, further keys of [environment], and parts of the error.
WRONG = {
    "import": ("import torch, nowhere", "", ["imports nowhere", "python3"]),
    "syntax": ("import torch\nif:", "", ["does not compile", "line 2"]),
    "python": (
        "import torch",
        'python = "/opt/none/python"',
        ["/opt/none/python in", "gave no answer"],
    ),
    "image": ("import torch", "", ["There is no image", "gone.sif"]),
    "other file": ("import torch", "", ["train.py gave no answer"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_found_before_submission(
    wrong: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """The image's own Python is probed, and a job that cannot run is not submitted."""
    script, keys, args = WRONG[wrong]
    image = {"image": "gone.sif", "other file": "train.py"}.get(wrong, str(IMAGE))
    config = CONFIG.replace(str(IMAGE), image)
    home = project(tmp_path / "project", script, config=f"{config}{keys}\n")
    done = slurm_paceline(
        "submit", "--nodes", "1", "--gpus", "1", "--time", "10m", "train.py", cwd=home
    )
    assert done.returncode != 0
    for word in args:
        assert word in done.stdout + done.stderr
    assert cluster.queue() == []
    assert list(Path.home().iterdir()) == []


def test_a_working_image_passes_the_checks(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    home = project(tmp_path / "project", "import torch, paceline", config=CONFIG)
    done = slurm_paceline("doctor", "--job", "train.py", cwd=home)
    out = done.stdout + done.stderr
    assert "/mnt/image" in out
    assert "python3 (3.13" in out
    assert "all found" in out


def test_a_shell_runs_in_the_container(tmp_path: Path, cluster: Cluster) -> None:
    home = project(tmp_path / "project", config=CONFIG + 'variables = { GREETING = "it is me" }\n')
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "shell", "--gpus", "1", "--time", "5m"],
        cwd=home,
        text=True,
        env={**os.environ, **cluster.environment, "PACELINE_SCRATCH": str(tmp_path / "scratch")},
        timeout=120,
        input='echo "$GREETING on $HOSTNAME in $APPTAINER_CONTAINER, at $PWD"\n',
        capture_output=True,
    )
    assert f"it is me on node1 in {IMAGE}, at {home}\n" in done.stdout, done.stderr
