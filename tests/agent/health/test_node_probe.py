"""A look at the ranks of a live run, from another process on their node."""

from __future__ import annotations

import pytest

from paceline.agent.health import node_probe
from paceline.contract.heartbeat_file import READY
from paceline.contract.stacks import read_stack
from tests.agent.conftest import Launch

SLEEPS = """\
import os, time; open(f"{os.environ['PACELINE_RUN']}/up-{os.environ['RANK']}", "w").write("up")

time.sleep(600)
"""


def test_stacks_are_dumped_only_if_a_rank_makes_no_progress(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launch(SLEEPS)
    for rank in (0, 1):
        launched.await_file(f"up-{rank}")
    found = node_probe.look(launched.run)
    assert [row[:3] for row in found["ranks"]] == [[0, READY, 0], [1, READY, 0]]
    stacks = launched.attempt().stacks(1)
    assert stacks.read_text() == "", "they have only just started"
    monkeypatch.setattr(node_probe, "SLOW_START", 0.0)
    monkeypatch.setattr(node_probe, "SECONDS", 0.5)
    found = node_probe.look(launched.run)
    assert stacks.read_text().count("Current thread") == 2
    assert found["dumped"] == [0, 1]
    assert found["changed"] == found["busy"] == found["awake"] == found["foreign"] == []
    stack = read_stack(stacks.read_text())
    assert stack is not None
    assert stack.where == "train.py:3 in <module>"
    assert stack.waits_in == ""
    monkeypatch.setattr(node_probe, "SLOW_START", 1000.0)
    node_probe.look(launched.run, stacks=True)
    assert stacks.read_text().count("Current thread") == 3


MOVES = """\
import os, time; open(f"{os.environ['PACELINE_RUN']}/up-{os.environ['RANK']}", "w").write("up")

while True: time.sleep(0.02) if os.environ["RANK"] == "0" else None
"""


def test_ranks_that_move(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launch(MOVES)
    for rank in (0, 1):
        launched.await_file(f"up-{rank}")
    monkeypatch.setattr(node_probe, "SLOW_START", 0.0)
    found = node_probe.look(launched.run)
    assert (0 in found["awake"], 1 in found["busy"]) == (True, True)
    launched.attempt().log(0).write_text("epoch 3\n")
    assert "dumped" not in node_probe.look(launched.run), "ranks that print are not stuck"


OWN_SIGNAL = """\
import os, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
open(f"{os.environ['PACELINE_RUN']}/up-{os.environ['RANK']}", "w").write("up")
time.sleep(600)
"""


def test_a_script_that_takes_the_signal_is_left_alone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may save and exit on SIGUSR2, as under submitit."""
    launched = launch(OWN_SIGNAL)
    for rank in (0, 1):
        launched.await_file(f"up-{rank}")
    monkeypatch.setattr(node_probe, "SECONDS", 0.5)
    monkeypatch.setattr(node_probe, "SLOW_START", 0.0)
    found = node_probe.look(launched.run, stacks=True)
    assert (found["foreign"], found["dumped"]) == ([0, 1], [])
    assert [row[4] for row in node_probe.look(launched.run)["ranks"]] == ["S", "S"]
    assert launched.process.poll() is None


def test_a_run_whose_agents_are_gone(launch: Launch) -> None:
    launched = launch("pass")
    launched.wait()
    assert node_probe.look(launched.run)["ranks"] == []
