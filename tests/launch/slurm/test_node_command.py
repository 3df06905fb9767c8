"""A paceline command on one node, with a fake srun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.slurm.node_command import run_on_node


def test_the_job_is_named_after_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/args\nexit 3\n')
    srun.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert run_on_node("n1", ["check", "--all"]) == 3
    args = (tmp_path / "args").read_text().split()
    assert {"--nodelist=n1", "--job-name=paceline-check"} <= set(args)
    assert args[-2:] == ["check", "--all"]
