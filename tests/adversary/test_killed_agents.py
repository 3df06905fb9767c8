"""Agents that are killed, as the out-of-memory killer does: the run continues within its retry policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Completed

pytestmark = pytest.mark.usefixtures("without_torch")

# Kills an agent in the first attempts, named in its events: that of the rank in the second argument.
KILLS = """\
import json, os, signal, sys, time
from pathlib import Path
attempt = int(os.environ["PACELINE_ATTEMPT"])
if attempt > int(sys.argv[1]):
    print(f"attempt {attempt} is complete")
elif os.environ["RANK"] == sys.argv[2]:
    lines = Path(os.environ["PACELINE_RUN"], "events", f"agent-{sys.argv[2]}.jsonl").read_text().splitlines()
    pids = [event["pid"] for event in map(json.loads, lines) if event["event"] == "started"]
    os.kill(pids[-1], signal.SIGKILL)
    time.sleep(600)
else:
    time.sleep(600)
"""


def test_a_killed_head_agent_costs_a_restart(
    tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").write_text(KILLS)
    done = paceline("run", "--nproc", "2", "--cpu", "--max-restarts", "1", "train.py", "1", "0")
    assert done.returncode == 0, done.stderr
    assert "attempt 2 is complete" in done.stdout
    assert (
        "an agent was killed: restarting from the script's own checkpoint, if any (1 of 1)"
        in done.stderr
    )
    shown = paceline("show").stdout
    assert re.search(
        r"^attempt 1  failed( after [^:]+)?: [^:]+: An agent was killed\.", shown, re.M
    )


SAVES = """\
import os
from pathlib import Path
folder = Path(os.environ["PACELINE_CHECKPOINTS"], f"step-{int(os.environ['PACELINE_ATTEMPT']):08d}")
if os.environ["RANK"] == "0":
    folder.mkdir()
    (folder / "complete.json").touch()
"""


def test_a_killed_head_agent_is_free_if_the_checkpoint_advanced(
    tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").write_text(SAVES + KILLS)
    done = paceline("run", "--nproc", "1", "--cpu", "--max-restarts", "1", "train.py", "2", "0")
    assert done.returncode == 0, done.stderr
    assert "attempt 3 is complete" in done.stdout
    assert (
        "an agent was killed: restarting from step 2 (free, as the checkpoint advanced)"
        in done.stderr
    )


def test_a_killed_member_agent_costs_a_restart(
    tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").write_text(KILLS)
    command = (
        "run",
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--cpu",
        "--max-restarts",
        "1",
        "train.py",
        "1",
        "1",
    )
    done = paceline(*command)
    assert done.returncode == 0, done.stderr
    assert "attempt 2 is complete" in done.stdout
    assert "failed: its agent was killed" in done.stderr
    assert "restarting from the script's own checkpoint, if any (1 of 1)" in done.stderr


def test_a_head_agent_that_is_killed_too_often_ends_the_run(
    tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").write_text(KILLS)
    done = paceline("run", "--nproc", "2", "--cpu", "train.py", "9", "0")
    assert done.returncode == 1
    assert "An agent was killed, and no restart was requested." in done.stderr
    assert "Traceback" not in done.stderr
