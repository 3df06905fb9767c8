"""The example of Horovod: two ranks of mpirun learn, exit with 75 if stopped, and resume to the same weights."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.ranks import EXAMPLES

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None,
        reason="Horovod is not built: paceline env build --with-horovod",
    ),
    pytest.mark.skipif(
        shutil.which("mpirun") is None, reason="OpenMPI is not installed: openmpi-bin"
    ),
]
# What rank 1 runs instead of the script: it gets the signal after some steps, and rank 0 must learn of it.
STOPPING = """\
import itertools, os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps, stop_at = itertools.count(1), int(sys.argv.pop(1))

def stop(*_):
    if next(steps) == stop_at and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        signal.raise_signal(signal.SIGUSR1)

register_optimizer_step_post_hook(stop)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_horovod(script: Path, stop_at: int, folder: Path) -> tuple[int, str]:
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    args = [
        str(stop_at),
        EXAMPLES / "horovod" / "train.py",
        "--cpu",
        "--samples",
        "1280",
        "--folder",
        folder,
    ]
    done = subprocess.run(
        [
            "mpirun",
            "-np",
            "2",
            "--oversubscribe",
            "--mca",
            "btl",
            "self,tcp",
            sys.executable,
            script,
            *args,
        ],
        env={**os.environ, **root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def load(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return loaded


def test_two_ranks_learn_stop_together_and_resume_exactly(tmp_path: Path) -> None:
    whole, parts, script = tmp_path / "whole", tmp_path / "parts", tmp_path / "stopping.py"
    script.write_text(STOPPING)
    code, printed = run_horovod(script, 0, whole)
    assert code == 0, printed
    accuracy = float(printed.split("final test accuracy: ")[1].split("%")[0])
    assert accuracy > 90
    code, printed = run_horovod(script, 30, parts)
    assert code == 75, printed
    step = load(parts)["step"]
    assert 0 < step < 100, "it was stopped in the middle"
    code, printed = run_horovod(script, 0, parts)
    assert code == 0, printed
    assert f"resumed at step {step}\n" in printed
    assert f"final test accuracy: {accuracy:.2f}%" in printed
    expected, found = load(whole), load(parts)
    assert found["step"] == expected["step"] == 100
    for name, tensor in expected["net"].items():
        assert torch.equal(found["net"][name], tensor), name
