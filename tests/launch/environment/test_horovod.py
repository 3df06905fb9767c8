"""Horovod, compiled for the torch of a venv, and used by two ranks of mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.runs import Paceline

ROOT = Path(__file__).parents[3]
SUM = """\
import json, pathlib, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
pathlib.Path(f"rank-{hvd.rank()}.json").write_text(json.dumps([hvd.size(), total.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    shutil.which("mpicxx") is None, reason="OpenMPI's compiler is not installed: libopenmpi-dev"
)
def test_built_for_this_torch_and_summing_over_two_ranks(
    tmp_path: Path, scratch: Path, paceline: Paceline
) -> None:
    home = tmp_path / "project"
    home.mkdir()
    (home / "requirements.txt").write_text("torch\n-c constraints.txt\n")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (home / "constraints.txt").write_text(
        "\n".join(line for line in pins if line.startswith(("torch", "cmake")))
    )
    done = paceline("env", "build", "--local", "--with-horovod", cwd=home, timeout=3500)
    if "could not download the source of Horovod" in done.stdout:
        pytest.skip("Horovod's source cannot be fetched here")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "horovod = true" in done.stdout
    (marker,) = scratch.glob("project/.environments/*/paceline-built.json")
    (home / "sum.py").write_text(SUM)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ran = subprocess.run(
        [
            "mpirun",
            "-np",
            "2",
            "--oversubscribe",
            "--mca",
            "btl",
            "self,tcp",
            marker.parent / "bin/python",
            "sum.py",
        ],
        cwd=home,
        env={**os.environ, **root},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    # Each rank has a file of its own: mpirun mixes what they print.
    for rank in range(2):
        assert json.loads((home / f"rank-{rank}.json").read_text()) == [2, [3.0, 3.0, 3.0]]
