"""Who may join: the head agent reads many connections at once, and trusts none before its handshake
is complete.

Others reach this port too: port scanners, another user's job, attackers. None of them may end the
run, delay it, or use up its descriptors. Each connection has a deadline and may send a fixed number
of bytes; if there are too many, the oldest from the busiest address goes. Nothing that a connection
sends raises an error here.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.agent.rendezvous.handshake import RESPONSE_SIZE, HeadHandshake

ACCEPTS_PER_ROUND = 64
MAX_HELLO = 16 << 20  # bytes; what an agent says about its node is far smaller


@dataclass(frozen=True)
class Candidate:
    """An agent that knows the token and has said what it is."""

    sock: socket.socket
    index: int
    hello: dict[str, Any]


class _Connection:
    def __init__(self, sock: socket.socket, address: str, token: str, deadline: float) -> None:
        self.sock = sock
        self.address = address
        self.deadline = deadline
        self.handshake = HeadHandshake(token)
        self.received = bytearray()
        self.is_agent = False  # it has proved that it knows the token


class Admission:
    """The connections to a listening socket that are not members yet. Close it to drop them all."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        handshake_timeout: float,
        max_connections: int = 1024,
    ) -> None:
        self._listener = listener
        self._token = token
        self._handshake_timeout = handshake_timeout
        self._max_connections = max_connections
        self._connections: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()

    def poll(self, timeout: float) -> Iterator[Candidate]:
        """Wait at most this long, and yield the agents whose handshake is complete. Their sockets
        block again.
        """
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._accept()
                continue
            connection: _Connection = key.data
            if self._connections.get(key.fd) is not connection:
                continue  # dropped in this round, to make room
            candidate = self._read(connection)
            if candidate is not None:
                yield candidate
        now = time.monotonic()
        for connection in [each for each in self._connections.values() if now > each.deadline]:
            self._drop(connection)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the peer is gone already
                self._make_room()
                return
            if len(self._connections) >= self._max_connections:
                self._make_room()
            self._greet(sock, str(address[0]))

    def _greet(self, sock: socket.socket, address: str) -> None:
        connection = _Connection(
            sock, address, self._token, time.monotonic() + self._handshake_timeout
        )
        try:
            sock.setblocking(False)
            sock.send(connection.handshake.challenge)  # a new connection has room for it
        except OSError:
            sock.close()
            return
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _make_room(self) -> None:
        """Drop the oldest connection from the address that has the most. Agents are through within
        milliseconds.
        """
        strangers = [each for each in self._connections.values() if not each.is_agent]
        if strangers:
            busiest = Counter(each.address for each in strangers).most_common(1)[0][0]
            self._drop(next(each for each in strangers if each.address == busiest))

    def _read(self, connection: _Connection) -> Candidate | None:
        try:
            while True:
                wanted = (
                    (1 << 16) if connection.is_agent else RESPONSE_SIZE - len(connection.received)
                )
                data = connection.sock.recv(wanted)
                connection.received += data
                if not data or not self._advance(connection):
                    self._drop(connection)
                    return None
                if connection.is_agent and connection.received.endswith(b"\n"):
                    return self._complete(connection)
        except BlockingIOError:
            return None
        except OSError:
            self._drop(connection)
            return None

    @staticmethod
    def _advance(connection: _Connection) -> bool:
        """Check the response once it is complete. Returns whether the connection may continue."""
        if connection.is_agent:
            return len(connection.received) <= MAX_HELLO
        if len(connection.received) < RESPONSE_SIZE:
            return True
        if not connection.handshake.check(bytes(connection.received)):
            return False
        connection.sock.send(connection.handshake.proof)
        connection.is_agent = True
        connection.received.clear()
        return True

    def _complete(self, connection: _Connection) -> Candidate | None:
        try:
            hello = json.loads(connection.received)
            if not isinstance(hello, dict):
                raise ValueError("not a mapping")
        except (ValueError, RecursionError):
            self._drop(connection)
            return None
        self._forget(connection)
        connection.sock.setblocking(True)
        return Candidate(connection.sock, connection.handshake.index, hello)

    def _forget(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        self._connections.pop(connection.sock.fileno(), None)

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.sock.close()
