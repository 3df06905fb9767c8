"""A look at the ranks of a live run, from another process on their node."""

from __future__ import annotations

import pytest

from paceline.agent.probe import node_probe
from paceline.contract.files.stacks import read_stack
from paceline.contract.heartbeat_file import READY
from tests.agent.conftest import Launch, until

SLEEPS = """\
import os, time; open(f"{os.environ['PACELINE_RUN']}/up-{os.environ['RANK']}", "w").write("up")

time.sleep(600)
"""


def test_stacks_are_dumped_only_if_a_rank_makes_no_progress(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launch(SLEEPS)
    for rank in (0, 1):
        launched.await_file(f"up-{rank}")
    found = node_probe.look(launched.run)
    assert [row[:3] for row in found["ranks"]] == [[0, READY, 0], [1, READY, 0]]
    stacks = launched.attempt().stacks(1)
    assert stacks.read_text() == "", "they have only just started"
    monkeypatch.setattr(node_probe, "SLOW_START", 0.0)
    node_probe.look(launched.run)
    until(lambda: stacks.read_text().count("Current thread") == 1, "no stack")
    stack = read_stack(stacks.read_text())
    assert stack is not None
    assert stack.where == "train.py:3 in <module>"
    assert stack.waits_in == ""
    monkeypatch.setattr(node_probe, "SLOW_START", 1000.0)
    node_probe.look(launched.run, stacks=True)
    until(lambda: stacks.read_text().count("Current thread") == 2, "no second stack")


def test_a_run_whose_agents_are_gone(launch: Launch) -> None:
    launched = launch("pass")
    launched.wait()
    assert node_probe.look(launched.run)["ranks"] == []
