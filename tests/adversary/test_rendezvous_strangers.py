"""Strangers on the rendezvous port: whatever they send, they neither end nor delay a run, nor learn its token."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.agent.rendezvous.handshake import (
    CHALLENGE_SIZE,
    RESPONSE_SIZE,
    HeadHandshake,
    greet_head,
    read_exactly,
)
from paceline.contract.run_folder import RunFolder
from tests.agent.rendezvous.test_connected_agents import WITHIN, Member
from tests.until import until

JOIN_TIMEOUT = 30.0  # seconds for all agents; idle connections used to take five each
INPUTS = 10_000


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "PACELINE_RUN": str(tmp_path),
        "PACELINE_JOB_START": "job_start",
        "PACELINE_TOKEN": "s3cret",
    }


def address_of_head(environ: dict[str, str]) -> tuple[str, int]:
    path = RunFolder(Path(environ["PACELINE_RUN"])).job_start(environ["PACELINE_JOB_START"]).head
    until(path.exists, "the head agent never listened")
    return "127.0.0.1", int(path.read_text().strip().rpartition(":")[2])


def hostile_inputs(count: int) -> Iterator[bytes]:
    """What a stranger might send: the known attacks, near misses of the protocol, and noise."""
    source = random.Random(7)
    hexadecimal = b"0123456789abcdef"
    known = [
        b'{"index": Infinity, "facts": {}}\n',
        b'{"index": 1, "count": 2, "nonce": "0", "proof": "0", "facts": {}}\n',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"\n",
        b"GET / HTTP/1.1\r\nHost: head\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        b"\n" * RESPONSE_SIZE,
        b"\xff" * RESPONSE_SIZE,
        "١".encode() * RESPONSE_SIZE,
        b"0" * (RESPONSE_SIZE - 1) + b"\n",
        b"f" * (RESPONSE_SIZE - 1) + b"\n",
        b"0" * (RESPONSE_SIZE - 1) + b"\n" + b'{"count": 2, "facts": {"host": "evil"}}\n',
    ]
    for number in range(count):
        if number < len(known) * 20:
            yield known[number % len(known)]
        elif number % 2:
            size = RESPONSE_SIZE + source.choice((-1, 0, 0, 0, 1))
            yield bytes(source.choices(hexadecimal, k=size - 1)) + b"\n"
        else:
            yield source.randbytes(source.randrange(200))


def attack(address: tuple[str, int], data: bytes, *, abort: bool) -> None:
    try:
        with socket.create_connection(address, timeout=WITHIN) as sock:
            if abort:  # closing sends a reset
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(data)
    except OSError:  # it closed the connection, as it should
        pass


@pytest.mark.timeout(300)
def test_hostile_connections_neither_end_nor_delay_the_run(environ: dict[str, str]) -> None:
    with ExitStack() as stack:
        head = stack.enter_context(Member(0, 2, 60.0, JOIN_TIMEOUT * 4, **environ)).started()
        address = address_of_head(environ)
        idle = [
            stack.enter_context(socket.create_connection(address, timeout=WITHIN))
            for _ in range(100)
        ]
        for number, data in enumerate(hostile_inputs(INPUTS)):
            attack(address, data, abort=number % 3 == 0)
        # A flood that goes on while the agent joins, beside connections that say nothing.
        joined = threading.Event()

        def flood() -> None:
            while not joined.is_set():
                attack(address, b"[" * 1000, abort=True)

        threads = [threading.Thread(target=flood) for _ in range(2)]
        idle += [
            stack.enter_context(socket.create_connection(address, timeout=WITHIN))
            for _ in range(100)
        ]
        for thread in threads:
            thread.start()
        try:
            member = stack.enter_context(Member(1, 2, 60.0, JOIN_TIMEOUT, **environ)).started()
            answers = [head.read(), member.read()]
        finally:
            joined.set()
            for thread in threads:
                thread.join()
        for answer in answers:
            assert [facts["host"] for facts in answer["roster"]] == ["host0", "host1"], answer
        head.send("prepare 1")
        assert member.ask("prepare 1") == head.read()
        assert len(idle) == 200


def test_an_idle_connection_costs_the_agents_no_time(environ: dict[str, str]) -> None:
    with ExitStack() as stack:
        head = stack.enter_context(Member(0, 2, 60.0, JOIN_TIMEOUT, **environ)).started()
        address = address_of_head(environ)
        idle = [
            stack.enter_context(socket.create_connection(address, timeout=WITHIN))
            for _ in range(26)
        ]
        member = stack.enter_context(Member(1, 2, 60.0, JOIN_TIMEOUT, **environ)).started()
        assert "roster" in head.read()
        assert "roster" in member.read()
        assert len(idle) == 26


def test_a_recorded_handshake_is_worthless_on_another_connection() -> None:
    """A proof is valid for one connection, one index and one direction."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        head = HeadHandshake("s3cret")
        ours.sendall(head.challenge)
        done: list[str] = []
        client = threading.Thread(target=lambda: done.append(_greet(theirs)))
        client.start()
        response = read_exactly(ours, RESPONSE_SIZE, time.monotonic() + WITHIN)
        assert head.check(response)
        assert head.index == 1
        ours.sendall(head.proof)
        client.join()
    assert done == ["accepted"]
    assert len(head.challenge) == CHALLENGE_SIZE
    assert b"s3cret" not in head.challenge + response + head.proof
    assert not HeadHandshake("s3cret").check(response), "another connection"
    assert not head.check(response[:32] + b"00000002" + response[40:]), "another index"
    assert not head.check(response[:40] + head.proof), "the other direction"


def _greet(sock: socket.socket) -> str:
    try:
        greet_head(sock, token="s3cret", index=1, deadline=time.monotonic() + WITHIN)
    except OSError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("challenge", "proof", "why"),
    [
        (
            json.dumps({"paceline": 1, "nonce": "0" * 32}).encode() + b"\n",
            b"",
            "not a Paceline agent",
        ),
        (b"paceline 2 " + b"x" * 32 + b"\n", b"", "not a Paceline agent"),
        (b"paceline 2 " + b"0" * 32 + b"\n", b"0" * 64 + b"\n", "belongs to another run"),
    ],
    ids=["other protocol", "bad nonce", "wrong token"],
)
def test_an_agent_does_not_believe_whoever_holds_the_port(
    challenge: bytes, proof: bytes, why: str
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(challenge + proof)
        assert why in _greet(theirs)
