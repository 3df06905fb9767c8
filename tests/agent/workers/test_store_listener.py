"""Ranks that connect to the store of rank 0 before it listens."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from paceline.agent.rendezvous.network import bind_port
from paceline.agent.workers import bootstrap
from paceline.agent.workers.bootstrap import await_listener, wait_for_store


def test_a_reserved_port_has_no_listener_until_somebody_listens() -> None:
    with bind_port(0) as reserved:
        port = reserved.getsockname()[1]
        assert not await_listener(port, timeout=0.05)
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(await_listener(port)))
        waiting.start()
        # as rank 0 does, although the agent and the waiting rank have the port
        with bind_port(port, backlog=1):
            waiting.join(60)
        assert found == [True]


class Store:
    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False
    ) -> None:
        self.port = port


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports whose listener was awaited."""
    ports: list[int] = []
    monkeypatch.setattr(bootstrap, "await_listener", ports.append)
    return ports


def connect(environ: dict[str, str], *args: Any, **kwargs: Any) -> Store:
    class Distributed:
        TCPStore = type("TCPStore", (Store,), {})

    wait_for_store(Distributed, {"MASTER_PORT": "29500", **environ})
    made: Store = Distributed.TCPStore(*args, **kwargs)
    return made


def test_a_rank_on_the_node_of_rank_0_waits(waited: list[int]) -> None:
    environ = {"RANK": "1", "GROUP_RANK": "0"}
    assert connect(environ, "127.0.0.1", 29500, 2, False).port == 29500
    assert connect(environ, host_name="127.0.0.1", port=29500).port == 29500
    assert waited == [29500, 29500]


@pytest.mark.parametrize(
    ("environ", "port", "is_master"),
    [
        ({"RANK": "0", "GROUP_RANK": "0"}, 29500, False),
        ({"RANK": "8", "GROUP_RANK": "1"}, 29500, False),
        ({"RANK": "1", "GROUP_RANK": "0"}, 29501, False),
        ({"RANK": "1", "GROUP_RANK": "0"}, 29500, True),
    ],
)
def test_nobody_else_waits(
    waited: list[int], environ: dict[str, str], port: int, is_master: bool
) -> None:
    assert connect(environ, "127.0.0.1", port, 2, is_master).port == port
    assert connect(environ, "127.0.0.1", port=port, is_master=is_master).port == port
    assert waited == []
