"""Ranks that run a script independently: the run says so while it lasts, and never of scripts that form a group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.agent.health import separate_copies as independence
from paceline.agent.health.heartbeat import Heartbeats, write_coordination
from paceline.agent.launcher_placement import Placement
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.workers import started_ranks
from paceline.contract.heartbeat_file import SPAWNS_ALONE, TRAINS_ALONE
from paceline.contract.jsonl import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from tests.agent.conftest import Launch, Launched, until
from tests.ports import free_port

INDEPENDENT = "2 processes run this script independently"

TRAIN = """
import os, time
import torch
from paceline.agent.workers import coordination_probe
coordination_probe.SECONDS = 0.1
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), 0.1)
def step():
    model(torch.randn(1, 2)).sum().backward()
    opt.step()
"""
FOREVER = """
while not os.path.exists("enough"):
    step()
    time.sleep(0.01)
"""
GROUP = """
torch.distributed.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.randn(1, 2)).sum().backward()
torch.distributed.destroy_process_group()
"""


def independent_events(started: Launched) -> list[dict[str, Any]]:
    lines = (started.run.events / "agent-0.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "independent"]


@pytest.mark.parametrize("style", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_copies_that_train_are_reported_while_they_do(launch: Launch, style: str) -> None:
    started = launch(TRAIN + FOREVER, light=False, style=style)
    until(lambda: INDEPENDENT in started.err(), f"the warning; console:\n{started.err()}")
    (started.run.path / "enough").touch()
    assert started.wait() == 0, started.err()
    assert started.err().count("independently") == 1
    assert "--nproc 1" in started.err()
    assert "init_process_group" in started.err()
    assert [event["processes"] for event in independent_events(started)] == [2]


def test_a_short_run_is_reported_at_its_end(launch: Launch) -> None:
    started = launch("print('hello')")
    assert started.wait() == 0, started.err()
    assert started.err().count(INDEPENDENT) == 1


@pytest.mark.parametrize("style", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_group_that_is_formed_late(launch: Launch, style: str) -> None:
    started = launch(
        TRAIN.replace("0.1\nmodel", "30\nmodel") + "for _ in range(5): step()\n" + GROUP,
        light=False,
        style=style,
    )
    assert started.wait() == 0, started.err()
    assert "independently" not in started.err()


SPAWN = """
import os
import torch.multiprocessing as mp
def child(index):
    import torch.distributed as dist
    os.environ["MASTER_PORT"] = "{port}"
    dist.init_process_group("gloo", rank=index, world_size=2, init_method="tcp://127.0.0.1:{port}")
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(child, nprocs=2)
"""
ALONE = SPAWN.replace("world_size=2", "world_size=1").replace("nprocs=2", "nprocs=1")


@pytest.mark.slow
def test_a_script_that_spawns_its_own_ranks(launch: Launch) -> None:
    """Under fork each rank would spawn all of them, and all would want the same port."""
    started = launch(ALONE.format(port=free_port()), light=False)
    started.wait()
    assert "each calls mp.spawn" in started.err() or "each rank calls mp.spawn" in started.err()
    assert "--style spawn" in started.err()


@pytest.mark.slow
def test_the_spawn_style_with_a_script_that_spawns_and_one_that_does_not(
    launch: Launch, tmp_path: Path
) -> None:
    started = launch(SPAWN.format(port=free_port()), light=False, style="spawn")
    assert started.wait() == 0, started.err()
    assert "warning" not in started.err()
    started = launch(
        TRAIN + "for _ in range(5): step()\n",
        light=False,
        style="spawn",
        folder=tmp_path / "second",
    )
    assert started.wait() == 0, started.err()
    assert "1 process runs this script, not 2" in started.err()


class Link:
    """Takes the place of the rendezvous, and keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], to: int) -> None:
        self.sent.append({**message, "from": 1})


def test_the_head_agent_waits_for_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(independence, "CHECK_INTERVAL", 0.0)
    spec = LaunchSpec("run", "train.py", [], nodes=2, nproc=1)
    said: list[str] = []
    link = Link()
    heartbeats = [Heartbeats(1), Heartbeats(1)]
    attempt = RunFolder(tmp_path).attempt(1)
    head, member = (
        independence.SeparateCopies(
            started_ranks.Launch(
                spec, Placement(node, 2, node, 2, [0], node, 1, "here"), attempt, "", "", 0, {}, {}
            ),
            heartbeats=heartbeats[node],
            rendezvous=cast(Rendezvous, link),
            say=said.append,
            events=EventWriter(tmp_path / "events.jsonl"),
        )
        for node in (0, 1)
    )
    try:
        for check in (head, member, head):
            check.check()
        assert (said, link.sent) == ([], [])
        write_coordination(str(heartbeats[0].path), local_rank=0, coordination=TRAINS_ALONE)
        head.check()
        assert said == [], "the other node's rank may have formed a group"
        write_coordination(str(heartbeats[1].path), local_rank=0, coordination=SPAWNS_ALONE)
        member.check()
        assert link.sent == [], "a script may prepare data with mp.spawn, and form a group then"
        write_coordination(str(heartbeats[1].path), local_rank=0, coordination=TRAINS_ALONE)
        for _ in range(2):
            member.check()
        assert len(link.sent) == 1
        head.update(link.sent[0])
        for _ in range(2):
            head.check()
        head.finish([TRAINS_ALONE, TRAINS_ALONE])
        assert [INDEPENDENT in line for line in said] == [True, False]
    finally:
        for each in heartbeats:
            each.remove()
