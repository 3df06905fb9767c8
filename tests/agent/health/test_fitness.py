"""The fitness check of all agents: they agree on what is slow."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.health.preflight import FitnessCheck
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.contract.fitness import Judgement, Measurement
from paceline.contract.run_folder import RunFolder


class Connection(Rendezvous):
    """The rendezvous of one of several agents, in memory."""

    def __init__(self, index: int, inboxes: list[list[dict[str, Any]]]) -> None:
        self.index, self.inboxes = index, inboxes

    def send(self, message: dict[str, Any], *, to: int | None = None) -> None:
        for index, inbox in enumerate(self.inboxes):
            if index != self.index and to in (None, index):
                inbox.append(json.loads(json.dumps({**message, "from": self.index})))

    def poll(self) -> list[dict[str, Any]]:
        found, self.inboxes[self.index][:] = list(self.inboxes[self.index]), []
        return found

    def put_back(self, messages: list[dict[str, Any]]) -> None:
        self.inboxes[self.index][:0] = messages

    @property
    def present(self) -> set[int]:
        return set(range(len(self.inboxes)))


Results = list[list[Measurement]]


@pytest.fixture
def agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Results], list[list[Judgement]]]:
    """`agents(results)`: let agents with these measurements agree, and return what each of them found."""

    def agree(results: Results) -> list[list[Judgement]]:
        inboxes: list[list[dict[str, Any]]] = [[] for _ in results]
        inboxes[0].append({"kind": "heartbeats", "from": 1})  # meant for another caller
        found: dict[int, list[Judgement]] = {}

        def run(index: int) -> None:
            placement = SimpleNamespace(is_head=index == 0, count=len(results), host=f"node{index}")
            one: Any = FitnessCheck(
                SimpleNamespace(placement=placement),
                RunFolder(tmp_path),
                Connection(index, inboxes),
                lambda: False,
            )  # type: ignore[arg-type]
            one._measure = lambda deadline: results[index]
            found[index] = one.run()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert inboxes[0] == [{"kind": "heartbeats", "from": 1}], "kept for whom it is meant"
        return [found[index] for index in sorted(found)]

    return agree


def measured(node: int, tflops: float) -> list[Measurement]:
    return [Measurement(node, f"node{node}", node, "cpu", tflops=tflops, complete=True)]


def test_all_agents_learn_which_node_is_slow(
    agents: Callable[[Results], list[list[Judgement]]], tmp_path: Path
) -> None:
    found = agents([measured(0, 0.03), measured(1, 0.01), measured(2, 0.03)])
    assert found[0] == found[1] == found[2]
    assert [(each.host, each.unfit) for each in found[0]] == [("node1", True)]
    record = json.loads(RunFolder(tmp_path).fitness.read_text())
    assert [each["tflops"] for each in record["ranks"]] == [0.03, 0.01, 0.03]


def test_a_node_that_measures_nothing_in_time_is_named(
    agents: Callable[[Results], list[list[Judgement]]],
) -> None:
    found = agents([measured(0, 0.03), []])
    assert [(each.host, each.unfit) for each in found[0]] == [("node1", False)]
    assert agents([[], []]) == [[], []], "nobody has torch"
