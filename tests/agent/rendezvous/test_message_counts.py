"""How many lines agents send: at most two per agent for any event, whatever their number."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.attempt import Attempt
from paceline.agent.rank_failures import Failure
from paceline.agent.rendezvous.connected_agents import Rendezvous
from paceline.agent.rendezvous.transport import Transport


class Star:
    """Simulated agents that pass each other messages as `Rendezvous` does, and count the lines."""

    def __init__(self, count: int) -> None:
        self.sent = 0
        self.inboxes: list[deque[dict[str, Any]]] = [deque() for _ in range(count)]
        self.attempts = [self._attempt(index) for index in range(count)]

    def _attempt(self, index: int) -> Attempt:
        """An attempt of which only what handles messages is real."""
        attempt = Attempt.__new__(Attempt)
        attempt.placement = SimpleNamespace(is_head=index == 0, index=index, host="h")  # type: ignore[assignment]
        attempt.rendezvous = SimpleNamespace(  # type: ignore[assignment]
            send=lambda message, to=None: self.send(index, message),
            poll=lambda: self.take(index),
            was_killed=lambda index, closed: False,
            roster=[{"host": "h"}] * len(self.inboxes),
        )
        attempt.termination = SimpleNamespace(start=lambda: None)  # type: ignore[assignment]
        attempt.events = SimpleNamespace(write=lambda *_, **__: None)  # type: ignore[assignment]
        attempt.folder = SimpleNamespace(number=1)  # type: ignore[assignment]
        attempt.failures, attempt.member_exits, attempt.outcome = [], {}, None
        attempt.agent_killed = False
        return attempt

    def send(self, index: int, message: dict[str, Any]) -> None:
        for receiver in range(1, len(self.inboxes)) if index == 0 else [0]:
            self.sent += 1
            self.inboxes[receiver].append({**message, "from": index})

    def take(self, index: int) -> list[dict[str, Any]]:
        messages = list(self.inboxes[index])
        self.inboxes[index].clear()
        return messages

    def settle(self) -> None:
        while any(self.inboxes):
            for attempt in self.attempts:
                attempt._handle_messages()


def failure_of(rank: int) -> Failure:
    return Failure("error", "h", rank, message="no", time=float(rank))


@pytest.mark.parametrize("count", [64, 1024])
def test_every_rank_fails(count: int) -> None:
    star = Star(count)
    for index, attempt in enumerate(star.attempts):
        for rank in (2 * index, 2 * index + 1):
            attempt._fail(failure_of(rank))
    star.settle()
    assert star.sent <= 2 * count
    assert all(attempt.failures for attempt in star.attempts)


@pytest.mark.parametrize("count", [64, 1024])
def test_one_rank_fails(count: int) -> None:
    star = Star(count)
    star.attempts[count // 2]._fail(failure_of(7))
    star.settle()
    assert star.sent == count
    assert all(attempt.failures[0].rank == 7 for attempt in star.attempts)


@pytest.mark.parametrize("count", [64, 1024])
def test_an_agent_is_lost(count: int) -> None:
    """The transport tells the members, and the head agent tells them what it means."""
    star = Star(count)
    lost = {"kind": "lost", "index": 9, "closed": False}
    star.inboxes[0].append({**lost, "from": 9})
    star.send(0, lost)
    star.settle()
    assert star.sent <= 2 * count


def test_the_others_train_on_without_an_agent_whose_ranks_have_ended() -> None:
    star = Star(3)
    ended: list[int] = []
    for index, attempt in enumerate(star.attempts):
        attempt.termination = SimpleNamespace(start=lambda index=index: ended.append(index))  # type: ignore[assignment]
    star.attempts[0].member_exits[2] = []
    lost = {"kind": "lost", "index": 2, "closed": True}
    star.inboxes[0].append({**lost, "from": 2})
    star.send(0, lost)
    star.settle()
    assert not ended


def test_late_exits_do_not_count_for_the_next_attempt() -> None:
    """Of ranks that took longer to end than the head agent waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    head, member = (
        Rendezvous(
            SimpleNamespace(is_head=index == 0, index=index, count=2),  # type: ignore[arg-type]
            [{"host": "a"}, {"host": "b"}],
            transport=Transport({1 - index: sock}, is_head=index == 0, silence_timeout=600.0),
        )
        for index, sock in enumerate((ours, theirs))
    )
    member.send({"kind": "exits"})
    member.send({"kind": "stop"})
    preparing = threading.Thread(target=member.prepare, args=(2,))
    preparing.start()
    head.prepare(2)
    preparing.join()
    assert [message["kind"] for message in head.poll()] == ["stop"]
    member.close()
    head.close()


def test_a_loss_and_a_goodbye_are_told_once() -> None:
    """Members say goodbye to the head agent alone."""
    count = 64
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = [socket.create_connection(listener.getsockname()) for _ in range(1, count)]
        ours = {index: listener.accept()[0] for index in range(1, count)}
    head = Transport(ours, is_head=True, silence_timeout=600.0)
    lines: list[dict[str, Any]] = []
    streams = [sock.makefile("rb") for sock in theirs]
    streams.pop().close()
    theirs.pop().close()
    lost = head.wait(30.0)
    assert [message["kind"] for message in lost] == ["lost"]
    for sock in theirs:
        sock.sendall(b'{"kind": "left"}\n')
    left: list[int] = []
    while len(left) < count - 2:
        left += [message["from"] for message in head.wait(30.0)]
    for sock in theirs:
        sock.shutdown(socket.SHUT_WR)
    head.close()
    for stream, sock in zip(streams, theirs, strict=True):
        lines += map(json.loads, stream)
        stream.close()
        sock.close()
    received = Counter(line.get("kind", "ping") for line in lines)
    assert received["lost"] == count - 2
    assert received["left"] <= count - 2
    assert set(received) <= {"lost", "left", "ping"}
