"""torchrun as a child of the agent: it ends when the agent wants it to, and when the agent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.agent.attempt import Termination
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.workers.group_selection import TorchrunRanks
from paceline.agent.workers.zygote.start import python_command


def test_a_torchrun_that_waits_for_another_node_is_ended() -> None:
    """It has started no rank yet, and would wait for many minutes."""
    heartbeats = Heartbeats(2)
    waiting = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        workers = TorchrunRanks(heartbeats)
        workers._torchrun = waiting
        workers._launch = cast(Any, SimpleNamespace(placement=SimpleNamespace(local_ranks=[0, 1])))
        Termination(workers, heartbeats, kill_after=5.0).start()
        assert waiting.wait(10) == -signal.SIGTERM
    finally:
        waiting.kill()
        heartbeats.remove()


AGENT = """
import os, subprocess, sys, time
subprocess.Popen([each.replace("PARENT", str(os.getpid())) for each in sys.argv[1:]], start_new_session=True)
time.sleep(600)
"""
TORCHRUN = """
import sys, time
def main(args):
    print(*args, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do this")
def test_torchrun_dies_with_its_agent(tmp_path: Path) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed" / "__init__.py").touch()
    (tmp_path / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
    command = [
        *python_command(sys.executable, "agent.workers.group_selection"),
        "PARENT",
        "--nnodes=2",
    ]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *command], stdout=subprocess.PIPE, env=environ
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"--nnodes=2\n"
    agent.kill()
    agent.wait()
    assert agent.stdout.read() == b"", "the pipe closes once the child is gone"
    agent.stdout.close()
