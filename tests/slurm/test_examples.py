"""The examples on two nodes: preempted once in the middle, they go on and get as good as without it."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from tests.slurm.harness import Cluster
from tests.slurm.runs import Paceline, diagnostics, run_of

EXAMPLES = Path(__file__).parents[2] / "examples"


# The arguments of each, what it prints at the end, and between which numbers that is.
CASES = {
    "text": (["--steps", "200", "--batch-size", "16"], r"final perplexity: ([\d.]+)", 1.0, 8.0),
    "classify": (["--epochs", "2"], r"final test accuracy: ([\d.]+)%", 90.0, 100.0),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", CASES)
def test_a_preempted_example(example: str, tmp_path: Path, cluster: Cluster, slurm_paceline: Paceline) -> None:
    args, result, at_least, at_most = CASES[example]
    home = tmp_path / example
    shutil.copytree(EXAMPLES / example, home, ignore=shutil.ignore_patterns("__pycache__"))
    submit = ("submit", "--nodes", "2", "--nproc", "1", "--cpu", "--cpus-per-gpu", "1", "--time", "20m")
    folder = run_of(slurm_paceline(*submit, "train.py", *args, cwd=home, check=True))
    job = folder.job.read_text().strip()
    deadline = time.monotonic() + 400
    while not folder.metrics.exists() or folder.metrics.read_text(encoding="utf-8").count("\n") < 20:
        assert time.monotonic() < deadline, diagnostics(folder)
        time.sleep(0.1)
    cluster.run(["scancel", "--batch", "--signal=USR1", job])
    assert cluster.wait(job, timeout=600) == "COMPLETED", diagnostics(folder)
    assert cluster.restarts(job) == 1
    first, second = (folder.attempt(number).log(0).read_text(encoding="utf-8") for number in (1, 2))
    assert not re.search(result, first), "it was stopped in the middle"
    assert "resumed at step" in second
    found = re.search(result, second)
    assert found, second
    assert at_least < float(found[1]) <= at_most
