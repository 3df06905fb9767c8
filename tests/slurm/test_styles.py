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


def check_style(
    style: str, *, nodes: int, tmp_path: Path, paceline: Paceline, per_node: int = 2, more: str
) -> None:
    if style.startswith("mpirun") and shutil.which("mpirun") is None:
        pytest.skip("OpenMPI is not installed: openmpi-bin")
    home = project(tmp_path / "project", PLAIN + more, config=CONFIG)
    script = "train.py"
    if style == "spawn":
        script = "spawning.py"
        (home / script).write_text(SPAWNING.format(path=str(home / "train.py")), encoding="utf-8")
    done = paceline(
        "submit",
        *STYLES[style],
        "--nodes",
        str(nodes),
        "--gpus",
        str(per_node),
        "--cpu",
        "--time",
        "10m",
        "--wait",
        script,
        cwd=home,
        timeout=500,
    )
    folder, world = run_of(done), nodes * per_node
    assert done.returncode == 0, diagnostics(folder, done)
    summed = f"the sum over {world} ranks is {sum(range(world))}"
    assert not more or summed in folder.attempt(1).log(0).read_text(encoding="utf-8")
    ranks = rank_reports(folder)
    assert sorted(ranks) == list(range(world)), diagnostics(folder, done)
    hosts = {node: ranks[per_node * node]["host"] for node in range(nodes)}
    assert len(set(hosts.values())) == nodes
    gpus = ",".join(map(str, range(per_node)))
    for rank, each in ranks.items():
        node, local = divmod(rank, per_node)
        numbers = (
            each["WORLD_SIZE"],
            each["LOCAL_RANK"],
            each["LOCAL_WORLD_SIZE"],
            each["GROUP_RANK"],
        )
        assert numbers == (str(world), str(local), str(per_node), str(node)), rank
        assert each["host"] == hosts[node]
        slurm = [each["environ"].get(f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NTASKS")]
        # docs/migration.md: scripts that read Slurm's variables keep working
        if style.startswith("srun"):
            assert slurm == [str(rank), str(local), str(world)], rank
        elif style == "fork":  # the tasks are the agents
            assert slurm == [str(node), "0", str(nodes)], rank
        assert each["gpus"] == (str(local) if style == "srun-one-gpu-each" else gpus)
    assert len({(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in ranks.values()}) == 1


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("style", ["fork", "srun", "mpirun"])
def test_placement_on_two_nodes(
    style: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    check_style(style, nodes=2, tmp_path=tmp_path, paceline=slurm_paceline, more="")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_on_two_nodes(tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    check_style(
        "torchrun", nodes=2, per_node=1, tmp_path=tmp_path, paceline=slurm_paceline, more=SESSION
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_sessions(
    style: str, nodes: int, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    check_style(style, nodes=nodes, tmp_path=tmp_path, paceline=slurm_paceline, more=SESSION)


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


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_loss_curve_of_a_whole_run_on_two_nodes_matches_local(
    tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    """Train two epochs on the bundled digits: 10,000 images in batches of 64, dropping the last batch.

    The example gives the same numbers on two nodes and on this machine, with two single-threaded ranks. Both use the
    same kernels and thread counts, and a sum of two gradients has only one order, so the runs agree to the last bit.
    The tolerance covers one rounding; a difference in a gradient or a sample would grow far beyond it.
    """
    args = ("--env", "OMP_NUM_THREADS=1", str(EXAMPLE / "train.py"), "--epochs", "2")
    two_nodes = slurm_paceline(
        "submit",
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--time",
        "30m",
        "--wait",
        *args,
        timeout=1200,
        PACELINE_SCRATCH=str(tmp_path / "cluster"),
    )
    assert two_nodes.returncode == 0, diagnostics(run_of(two_nodes), two_nodes)
    here = ("run", "--nproc", "2", "--cpu", *args)
    slurm_paceline(*here, timeout=1200, check=True, PACELINE_SCRATCH=str(tmp_path / "local"))
    remote, local = curve(tmp_path / "cluster"), curve(tmp_path / "local")
    assert remote["step"] == local["step"] == list(range(1, 2 * 156 + 1))
    assert remote["loss"] == pytest.approx(local["loss"], rel=1e-6)
    assert remote["accuracy"] == local["accuracy"]
