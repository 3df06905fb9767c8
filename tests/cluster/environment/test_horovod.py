"""Horovod, compiled for the torch of a venv, and used by two ranks of mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.runs import Type

ROOT = Path(__file__).parents[3]
SUM = """\
import torch, horovod.torch as hvd
hvd.init()
told = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
assert told.tolist() == [3.0, 3.0, 3.0], told
print("rank", hvd.rank(), "of", hvd.size(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    shutil.which("mpicxx") is None, reason="OpenMPI's compiler is not installed: libopenmpi-dev"
)
def test_built_for_this_torch_and_summing_over_two_ranks(
    tmp_path: Path, scratch: Path, paceline: Type
) -> None:
    home = tmp_path / "project"
    home.mkdir()
    (home / "requirements.txt").write_text("torch\n")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (home / "constraints.txt").write_text(
        "\n".join(line for line in pins if line.startswith(("torch", "cmake")))
    )
    done = paceline("env", "build", "--local", "--with-horovod", cwd=home, timeout=3500)
    if "could not fetch Horovod's source" in done.stdout:
        pytest.skip("Horovod's source cannot be fetched here")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "horovod = true" in done.stdout
    (marker,) = scratch.glob("project/.environments/*/paceline-built.json")
    (home / "sum.py").write_text(SUM)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ran = subprocess.run(
        ["mpirun", "-np", "2", "--oversubscribe", "--mca", "btl", "self,tcp", marker.parent / "bin/python", "sum.py"],
        cwd=home, env={**os.environ, **root}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n"))[1:] == ["rank 0 of 2", "rank 1 of 2"]
