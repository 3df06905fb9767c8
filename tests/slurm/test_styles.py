"""Every launch style on real nodes with a network between them: the right ranks in the right places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, SPAWNING, Type, everything, project, run_of, told

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "mnist"
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
# These run the example over the network; the others differ only in who starts the ranks, and need no torch to show it.
TRAINING = ("fork", "srun", "torchrun", "spawn", "mpirun")
CONFIG = """
[profiles.over.launch]
mpirun_over = "torchrun"
[profiles.one.launch]
gpu_binding = "one"
"""


# The example, for one step and one test, once the rank has told who it is.
MNIST = f"""\
import runpy, sys
sys.path.insert(0, {str(EXAMPLE)!r})
sys.argv[1:] = ["--dry-run", "--cpu"]
runpy.run_path({str(EXAMPLE / "train.py")!r}, run_name="__main__")
"""


def check_style(style: str, *, nodes: int, tmp_path: Path, paceline: Type) -> None:
    if style.startswith("mpirun") and shutil.which("mpirun") is None:
        pytest.skip("OpenMPI is not installed: openmpi-bin")
    home = project(tmp_path / "project", PLAIN + MNIST * (style in TRAINING), config=CONFIG)
    script = "train.py"
    if style == "spawn":
        script = "spawning.py"
        (home / script).write_text(SPAWNING.format(path=str(home / "train.py")), encoding="utf-8")
    done = paceline(
        "submit", *STYLES[style], "--nodes", str(nodes), "--gpus", "2", "--cpu", "--time", "10m", "--wait", script,
        cwd=home, timeout=500,
    )  # fmt: skip
    folder = run_of(done)
    assert done.returncode == 0, everything(folder, done)
    if style in TRAINING:
        assert "final test accuracy" in folder.attempt(1).log(0).read_text(encoding="utf-8")
    ranks = told(folder)
    assert sorted(ranks) == list(range(2 * nodes)), everything(folder, done)
    hosts = {node: ranks[2 * node]["host"] for node in range(nodes)}
    assert len(set(hosts.values())) == nodes
    for rank, each in ranks.items():
        node, local = divmod(rank, 2)
        numbers = (each["WORLD_SIZE"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"], each["GROUP_RANK"])
        assert numbers == (str(2 * nodes), str(local), "2", str(node)), rank
        assert each["host"] == hosts[node]
        assert each["gpus"] == (str(local) if style == "srun-one-gpu-each" else "0,1")
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks.values()}) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", STYLES)
def test_two_nodes(style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Type) -> None:
    check_style(style, nodes=2, tmp_path=tmp_path, paceline=slurm_paceline)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", STYLES)
def test_one_node(style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Type) -> None:
    check_style(style, nodes=1, tmp_path=tmp_path, paceline=slurm_paceline)


def losses(scratch: Path) -> list[tuple[int, float]]:
    (metrics,) = scratch.glob("*/*/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.timeout(900)
def test_the_loss_curve_on_two_nodes_is_the_local_one(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Type
) -> None:
    script, words = EXAMPLE / "train.py", ("--epochs", "1")
    many = slurm_paceline(
        "submit", "--nodes", "2", "--nproc", "1", "--cpu", "--max-steps", "6", "--time", "10m", "--wait", str(script),
        *words, timeout=600, PACELINE_SCRATCH=str(tmp_path / "cluster"),
    )  # fmt: skip
    assert many.returncode == 0, everything(run_of(many), many)
    slurm_paceline(
        "run", "--nproc", "2", "--cpu", "--max-steps", "6", str(script), *words, timeout=600, check=True,
        PACELINE_SCRATCH=str(tmp_path / "local"),
    )  # fmt: skip
    remote, local = losses(tmp_path / "cluster"), losses(tmp_path / "local")
    assert [step for step, _ in remote] == list(range(1, 7))
    # The same samples in the same order; the dense kernels may add in another order with other threads.
    assert [loss for _, loss in remote] == pytest.approx([loss for _, loss in local], rel=1e-3)
