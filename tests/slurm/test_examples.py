"""The examples on two nodes: preempted once in the middle, they go on and get as good as without it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.contract.run_folder import RunFolder
from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, run_of
from tests.until import until

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    """The arguments of an example, what it prints at the end, and between which numbers that is."""

    args: str
    result: str
    at_least: float
    at_most: float
    begun: str = ""  # rank 0 prints this early on; without it, there are metrics
    make: str = ""  # a command of Python that makes its data
    needs: str = "torch"  # the package without which it cannot run
    is_slow: bool = True

    def has_begun(self, folder: RunFolder) -> bool:
        path = folder.attempt(1).log(0) if self.begun else folder.metrics
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return self.begun in text if self.begun else text.count("\n") >= 20


ACCURACY = r"final test accuracy: ([\d.]+)%"
PERPLEXITY = r"final perplexity: ([\d.]+)"
POINTS = "--samples 1920 --epochs 60"
CASES = {
    "bare": Case(
        "--samples 1920 --epochs 20", ACCURACY, 95.0, 100.0, begun="epoch 1:", is_slow=False
    ),
    "stream": Case("--epochs 20", ACCURACY, 95.0, 100.0),
    "stream --join": Case("--epochs 60", ACCURACY, 95.0, 100.0, begun="epoch 2 done"),
    "webdataset": Case(
        "--shards HOME/shards --epochs 8",
        ACCURACY,
        85.0,
        100.0,
        make=f"make_shards.py {EXAMPLES}/mnist/data shards --samples 3000 --shards 8",
    ),
    "horovod": Case(
        "--samples 1920 --epochs 60", ACCURACY, 95.0, 100.0, begun="epoch 1:", needs="horovod"
    ),
    "deepspeed": Case(
        "--samples 1920 --epochs 20", ACCURACY, 95.0, 100.0, begun="epoch 1:", needs="deepspeed"
    ),
    "fsdp": Case("--epochs 5", ACCURACY, 95.0, 100.0),
    "text": Case("--steps 200 --batch-size 16", PERPLEXITY, 1.0, 8.0),
    "classify": Case("--epochs 2", ACCURACY, 90.0, 100.0),
    "lightning": Case(f"--cpu {POINTS}", ACCURACY, 95.0, 100.0, begun="epoch 1:"),
    "lightning/train_fabric.py": Case(f"--cpu {POINTS}", ACCURACY, 95.0, 100.0, begun="epoch 1:"),
    "accelerate": Case(POINTS, ACCURACY, 95.0, 100.0, begun="epoch 1:"),
    "hf_trainer": Case("--cpu --steps 800 --batch-size 8", PERPLEXITY, 1.0, 3.2, begun="'loss'"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=pytest.mark.slow if case.is_slow else ())
        for name, case in CASES.items()
    ],
)
def test_a_preempted_example(
    example: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline
) -> None:
    case = CASES[example]
    if importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    example, *options = example.split()
    example, _, script = example.partition("/")
    home = tmp_path / example
    shutil.copytree(EXAMPLES / example, home, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    if case.make:
        subprocess.run([sys.executable, *case.make.split()], cwd=home, check=True)
    submit = (
        "submit",
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--cpus-per-gpu",
        "1",
        "--time",
        "20m",
    )
    folder = run_of(
        slurm_paceline(
            *submit,
            script or "train.py",
            *case.args.replace("HOME", str(home)).split(),
            *options,
            cwd=home,
            check=True,
        )
    )
    job = folder.job.read_text().strip()
    until(
        lambda: case.has_begun(folder),
        "it does not begin",
        details=lambda: diagnostics(folder),
        within=400,
    )
    cluster.run(["scancel", "--batch", "--signal=USR1", job])
    assert cluster.wait(job, timeout=600) == "COMPLETED", diagnostics(folder)
    assert cluster.restarts(job) == 1
    first, second = (folder.attempt(number).log(0).read_text(encoding="utf-8") for number in (1, 2))
    assert not re.search(case.result, first), "it was stopped in the middle"
    assert "resumed at step" in second
    found = re.search(case.result, second)
    assert found, second
    assert case.at_least < float(found[1]) <= case.at_most
