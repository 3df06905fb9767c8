"""Forked commands behave like started ones, and none outlives its test."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import marked
from tests.forked_cli import Commands


@pytest.mark.parametrize("args", [["--version"], ["ps"], ["show", "nothing"], ["submit", "--nodes", "x", "train.py"]])
def test_output_and_exit_code_are_those_of_a_started_command(
    forked_cli: Commands, tmp_path: Path, args: list[str]
) -> None:
    env = {**os.environ, "PACELINE_SCRATCH": str(tmp_path / "scratch")}
    started = subprocess.run(
        [sys.executable, "-m", "paceline", *args], cwd=tmp_path, env=env, capture_output=True, text=True, input=""
    )
    forked = forked_cli(args, cwd=tmp_path, env=env)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_a_command_that_does_not_end_is_killed(forked_cli: Commands, tmp_path: Path) -> None:
    env = {**os.environ, "PACELINE_SCRATCH": str(tmp_path / "scratch")}
    with pytest.raises(subprocess.TimeoutExpired):
        forked_cli(["ui", "--no-browser"], cwd=tmp_path, env=env, timeout=3)  # the guard fails if it goes on


def test_the_guard_sees_forked_commands(forked_cli: Commands, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        streams = forked_cli.start(connection, ["ui", "--no-browser"], tmp_path, dict(os.environ))
        deadline = time.monotonic() + 60
        while not any(streams.parts) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert any(streams.parts), "it said nothing"
        assert marked("no such token")


DESCRIBE = """
import json, os, sys
from pathlib import Path
import torch
parent = Path(f"/proc/{os.getppid()}")
seen = {
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "variables": sorted(os.environ), "flags": str(sys.flags),
    "threads": torch.get_num_threads(),
    "files": [os.readlink(f"/proc/self/fd/{number}").split(":")[0] for number in range(3)],
    "zygote": (parent / "comm").read_text(),
    "zygote's parent": (parent / "stat").read_text().rpartition(")")[2].split()[1] != "1",
}
Path(sys.argv[1] + os.environ["RANK"]).write_text(json.dumps(seen))
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ranks_of_a_forked_run_find_what_those_of_a_started_one_do(
    forked_cli: Commands, tmp_path: Path, ranks: str
) -> None:
    (tmp_path / "describe.py").write_text(DESCRIBE)
    env = {**os.environ, "PACELINE_SCRATCH": str(tmp_path / "scratch")}
    args = ["run", "--cpu", "--nproc", ranks, "--no-snapshot", "describe.py"]
    subprocess.run(
        [sys.executable, "-m", "paceline", *args, str(tmp_path / "started")],
        cwd=tmp_path, env=env, capture_output=True, check=True, input=b"",
    )  # fmt: skip
    forked = forked_cli([*args, str(tmp_path / "forked")], cwd=tmp_path, env=env)
    assert forked.returncode == 0, forked.stderr
    assert forked_cli.choose_server(args, env) is forked_cli.server_of_runs
    for rank in range(int(ranks)):
        ours, theirs = (json.loads((tmp_path / f"{each}{rank}").read_text()) for each in ("forked", "started"))
        ours["argv"], theirs["argv"] = ours["argv"][:1], theirs["argv"][:1]
        assert ours == theirs
