"""What works on a machine that has no Slurm, and what it says where it does not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Typed = subprocess.CompletedProcess[str]


def test_without_slurm(tmp_path: Path, paceline: Callable[..., Typed]) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    nothing = tmp_path / "bin"
    nothing.mkdir()
    os.symlink("/bin/sh", nothing / "sh")

    def type_it(*words: str) -> Typed:
        return paceline(*words, PATH=str(nothing))

    shown = type_it("submit", "--nodes", "2", "--gpus", "4", "--time", "1h", "--dry-run", "train.py", "a b")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("#!/bin/bash\n")
    assert "# submitted by: sbatch --parsable " in shown.stdout
    assert not (tmp_path / "scratch").exists()

    refused = type_it("submit", "--gpus", "1", "train.py")
    assert refused.returncode == 1
    assert "sbatch was not found" in refused.stderr
    assert "paceline sandbox up" in refused.stderr
    assert not (tmp_path / "scratch").exists()

    written = type_it("init")
    assert written.returncode == 0, written.stderr
    assert "There is no Slurm here" in (tmp_path / "paceline.toml").read_text()
    assert type_it("submit", "--dry-run", "train.py").returncode == 0, "what init writes can be read"

    assert "no sbatch here" in type_it("doctor").stdout
    assert "no runs in" in type_it("ps").stderr
    missing = type_it("logs", "nothing")
    assert missing.returncode == 2
    assert "There is no run 'nothing'" in missing.stderr
