"""The relay of these tests does what its page says: otherwise tests of bad links prove nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.remote.relay import Relay


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while part := connection.recv(65536):
                connection.sendall(part)

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def connect(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port), timeout=10)


def read(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count and (part := connection.recv(count - len(content))):
        content += part
    return content


def test_everything_passes_in_order(echo: int) -> None:
    content = bytes(range(256)) * 40_000  # more than may wait
    with Relay(echo, delay=0.01) as relay, connect(relay) as connection:
        threading.Thread(target=connection.sendall, args=(content,)).start()
        assert read(connection, len(content)) == content
        assert (relay.sent, relay.received, relay.connections) == (len(content), len(content), 1)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # the end passes too


def test_a_delay_counts_both_ways(echo: int) -> None:
    with Relay(echo, delay=0.1) as relay, connect(relay) as connection:
        begin = time.monotonic()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        assert time.monotonic() - begin >= 0.2


def test_nothing_passes_a_stalled_link_and_nothing_is_lost(echo: int) -> None:
    with Relay(echo) as relay, connect(relay) as connection:
        relay.stall_after(3)
        connection.sendall(b"abcdef")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert relay.is_stalled
        assert relay.sent == 3
        connection.settimeout(10)
        relay.resume()
        assert read(connection, 6) == b"abcdef"


def test_a_cut_link_ends_connections_until_it_is_restored(echo: int) -> None:
    with Relay(echo) as relay:
        with connect(relay) as connection:
            relay.cut_after(4)
            connection.sendall(b"abcdef")
            with pytest.raises(ConnectionResetError):
                read(connection, 10)
        assert relay.is_cut
        assert relay.sent == 4
        # the reset may come during connect
        with pytest.raises(ConnectionResetError), connect(relay) as refused:
            refused.recv(1)
        relay.restore()
        with connect(relay) as connection:
            connection.sendall(b"again")
            assert read(connection, 5) == b"again"
