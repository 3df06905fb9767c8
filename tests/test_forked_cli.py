"""Forked commands behave like started ones, and none outlives its test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import marked
from tests.forked_cli import Commands


@pytest.mark.parametrize(
    "args", [["--version"], ["ps"], ["show", "nothing"], ["submit", "--nodes", "x", "train.py"]]
)
def test_output_and_exit_code_are_those_of_a_started_command(
    forked_cli: Commands, tmp_path: Path, args: list[str]
) -> None:
    env = {**os.environ, "PACELINE_SCRATCH": str(tmp_path / "scratch")}
    started = subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        input="",
    )
    forked = forked_cli(args, cwd=tmp_path, env=env)
    assert (forked.returncode, forked.stdout, forked.stderr) == (
        started.returncode,
        started.stdout,
        started.stderr,
    )


def test_a_command_that_does_not_end_is_killed(forked_cli: Commands, tmp_path: Path) -> None:
    env = {**os.environ, "PACELINE_SCRATCH": str(tmp_path / "scratch")}
    with pytest.raises(subprocess.TimeoutExpired):
        # the guard fails if it goes on
        forked_cli(["ui"], cwd=tmp_path, env=env, timeout=3)


def test_the_guard_sees_forked_commands(forked_cli: Commands, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        streams = forked_cli.start(connection, ["ui"], tmp_path, dict(os.environ))
        deadline = time.monotonic() + 60
        while not any(streams.parts) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert any(streams.parts), "it said nothing"
        assert marked("no such token")
