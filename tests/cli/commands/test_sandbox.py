"""The commands of `paceline sandbox`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.tools.sandbox import NAMESPACES, PLAIN, Settings, missing_packages

pytestmark = pytest.mark.slurm
Completed = subprocess.CompletedProcess[str]


def test_a_session(paceline: Callable[..., Completed], tmp_path: Path) -> None:
    if packages := missing_packages(Settings(network=NAMESPACES if os.geteuid() == 0 else PLAIN)):
        pytest.skip(f"no Slurm to test on: install {' '.join(packages)}")
    box = tmp_path / "box"

    def sandbox(command: str, *args: str, code: int = 0) -> str:
        done = paceline("sandbox", command, *args, PACELINE_SANDBOX=str(box))
        assert done.returncode == code, (
            f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout + done.stderr

    assert "No sandbox is running" in sandbox("status", code=2)
    assert "no sandbox is running" in sandbox("down")
    try:
        output = sandbox("up", "--nodes", "2", "--gpus", "1", "--slurm-option", "MaxJobCount=321")
        assert 'eval "$(paceline sandbox env)"' in output
        export = sandbox("env")
        shell = f"{export}\nscontrol show config | grep MaxJobCount; srun -N2 true"
        shown = subprocess.run(["bash", "-ec", shell], text=True, capture_output=True, timeout=60)
        assert shown.returncode == 0, shown.stderr
        assert "321" in shown.stdout
        assert sandbox("exec", "2", "sh", "-c", 'printf "%s\\n" "$0"', "--dir").strip() == "--dir"
        sandbox("exec", "node1", "--", "sh", "-c", "exit 7", code=7)
        assert "no node" in sandbox("exec", "3", "true", code=2)
        sandbox("kill-node", "2", "--mark-down")
        status = sandbox("status")
        assert "powered off" in status
        assert "power cut" in status
        sandbox("start-node", "node2")
        if os.geteuid() == 0:
            sandbox("cut", "1")
            assert "disconnected" in sandbox("status")
            sandbox("heal", "1")
        sandbox("restart-controller", "--kill")
        status = sandbox("status")
        assert "powered off" not in status
        assert "disconnected" not in status
        assert "already" in sandbox("up", code=2)
    finally:
        output = sandbox("down")
    assert "is down" in output
    assert not (box / "sandbox.json").exists()


def test_invalid_options(paceline: Callable[..., Completed], tmp_path: Path) -> None:
    for args, flag in (
        (["--nodes", "0"], "--nodes"),
        (["--network", "ring"], "--network"),
        (["--slurm-option", "x"], "--slurm-option"),
    ):
        done = paceline("sandbox", "up", "--dir", str(tmp_path / "box"), *args)
        assert done.returncode == 2
        assert flag in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "box").exists()
