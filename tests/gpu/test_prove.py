"""`paceline prove` on a GPU: what it records waits for the device, so captured steps run eagerly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pydantic", reason="the command line needs it")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist" / "train.py"


def test_a_script_with_captured_steps_is_proved(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "paceline",
            "prove",
            "--ranks",
            "1",
            "--styles",
            "fork,torchrun",
            "--steps",
            "12",
            "--scratch",
            str(tmp_path / "runs"),
            str(EXAMPLE),
        ],
        cwd=EXAMPLE.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The training is the same" in done.stdout, done.stdout
