"""Every launch style on real nodes with a network: each rank has the right placement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import PLAIN, SPAWNING, Paceline, diagnostics, project, rank_reports, run_of

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
ELSEWHERE = ("mpirun-torchrun", "lightning", "accelerate", "srun-one-gpu-each", "spawn")  # variants, or tested locally
CONFIG = """
[profiles.over.launch]
mpirun_over = "torchrun"
[profiles.one.launch]
gpu_binding = "one"
"""


# Uses the runtime after the rank's report; the loss curve below is one of a training.
SESSION = """
import paceline

with paceline.session(cpu=True) as run:
    run.print("the sum over", run.world_size, "ranks is", run.sum(run.rank))
"""


def check_style(style: str, *, nodes: int, tmp_path: Path, paceline: Paceline) -> None:
    if style.startswith("mpirun") and shutil.which("mpirun") is None:
        pytest.skip("OpenMPI is not installed: openmpi-bin")
    home = project(tmp_path / "project", PLAIN + SESSION, config=CONFIG)
    script = "train.py"
    if style == "spawn":
        script = "spawning.py"
        (home / script).write_text(SPAWNING.format(path=str(home / "train.py")), encoding="utf-8")
    done = paceline(
        "submit", *STYLES[style], "--nodes", str(nodes), "--gpus", "2", "--cpu", "--time", "10m", "--wait", script,
        cwd=home, timeout=500,
    )  # fmt: skip
    folder = run_of(done)
    assert done.returncode == 0, diagnostics(folder, done)
    summed = f"the sum over {2 * nodes} ranks is {sum(range(2 * nodes))}"
    assert summed in folder.attempt(1).log(0).read_text(encoding="utf-8")
    ranks = rank_reports(folder)
    assert sorted(ranks) == list(range(2 * nodes)), diagnostics(folder, done)
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
@pytest.mark.parametrize(
    "style", [pytest.param(each, marks=pytest.mark.slow if each in ELSEWHERE else ()) for each in STYLES]
)
def test_two_nodes(style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    check_style(style, nodes=2, tmp_path=tmp_path, paceline=slurm_paceline)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("style", STYLES)
def test_one_node(style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    check_style(style, nodes=1, tmp_path=tmp_path, paceline=slurm_paceline)


def curve(scratch: Path) -> dict[str, list[float]]:
    """Return the metrics that rank 0 of the only run logged, by name."""
    (metrics,) = scratch.glob("*/*/*/metrics.jsonl")
    found: dict[str, list[float]] = {"loss": [], "accuracy": [], "step": []}
    for line in map(json.loads, metrics.read_text(encoding="utf-8").splitlines()):
        for name in ("loss", "accuracy"):
            if name in line:
                found[name].append(line[name])
        if "loss" in line:
            found["step"].append(line["step"])
    return found


def check_curve(*args: str, steps: int, epochs: int, tmp_path: Path, paceline: Paceline) -> None:
    """Check that the example gives the same numbers on two nodes and on this machine, with two single-threaded ranks.

    Both use the same kernels and thread counts, and a sum of two gradients has only one order, so the runs agree to
    the last bit. The tolerance covers one rounding; a difference in a gradient or a sample would grow far beyond it.
    """
    args = (*args, "--env", "OMP_NUM_THREADS=1", str(EXAMPLE / "train.py"), "--epochs", str(epochs))
    two_nodes = paceline(
        "submit", "--nodes", "2", "--nproc", "1", "--cpu", "--time", "30m", "--wait", *args, timeout=1200,
        PACELINE_SCRATCH=str(tmp_path / "cluster"),
    )  # fmt: skip
    assert two_nodes.returncode == 0, diagnostics(run_of(two_nodes), two_nodes)
    paceline("run", "--nproc", "2", "--cpu", *args, timeout=1200, check=True, PACELINE_SCRATCH=str(tmp_path / "local"))
    remote, local = curve(tmp_path / "cluster"), curve(tmp_path / "local")
    assert remote["step"] == local["step"] == list(range(1, steps + 1))
    assert remote["loss"] == pytest.approx(local["loss"], rel=1e-6)
    assert remote["accuracy"] == local["accuracy"]


@pytest.mark.timeout(900)
def test_loss_curve_on_two_nodes_matches_local(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    check_curve("--max-steps", "6", steps=6, epochs=1, tmp_path=tmp_path, paceline=slurm_paceline)


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_loss_curve_of_a_whole_run_on_two_nodes_matches_local(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Train two epochs on the bundled digits: 10,000 images in batches of 64, dropping the last batch."""
    check_curve(steps=2 * 156, epochs=2, tmp_path=tmp_path, paceline=slurm_paceline)
