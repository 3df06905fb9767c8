"""A bad link: a TCP relay on loopback that delays, falls silent, or cuts what passes through it.

with Relay(port) as relay:     # connect to relay.port in place of port
    relay.delay = 0.1          # seconds each way
    relay.stall()              # nothing passes any more, and nobody is told: as behind a VPN that went away
    relay.resume()             # what has waited arrives
    relay.cut()                # connections are reset and new ones refused
    relay.restore()            # new ones work again
    relay.cut_after(10_000)    # cut once so many bytes more have reached the server; `stall_after` likewise
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

BLOCK = 1 << 16
WAITING = 1 << 22  # bytes on their way, each direction; then the sender has to wait
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing resets the connection


class Relay:
    """Relays to a port of this machine. `sent` and `received` count bytes to and from it, `connections` logins."""

    def __init__(self, target: int, delay: float = 0.0) -> None:
        self.target, self.delay = target, delay
        self.sent = self.received = self.connections = 0
        self._changed = threading.Condition()
        self._stalled = self._is_cut = False
        self._limit: tuple[int, str] | None = None  # bytes to the server, and what happens then
        self._directions: list[_Direction] = []
        self._server = socket.create_server(("127.0.0.1", 0), backlog=50)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: Any) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    # -- what goes wrong ------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Let nothing pass, in both directions. New connections are accepted, and hear nothing."""
        with self._changed:
            self._stalled = True

    def resume(self) -> None:
        with self._changed:
            self._stalled = False
            self._changed.notify_all()

    def cut(self) -> None:
        """Reset all connections. New ones are reset too, until `restore`."""
        with self._changed:
            self._is_cut = True
            ended, self._directions = self._directions, []
            self._changed.notify_all()
        for direction in ended:
            direction.reset()

    def restore(self) -> None:
        with self._changed:
            self._is_cut = self._stalled = False
            self._limit = None
            self._changed.notify_all()

    def cut_after(self, count: int) -> None:
        """Cut once `count` bytes more have reached the server: in the middle of what is sent."""
        with self._changed:
            self._limit = self.sent + count, "cut"

    def stall_after(self, count: int) -> None:
        with self._changed:
            self._limit = self.sent + count, "stall"

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    @property
    def is_stalled(self) -> bool:
        return self._stalled

    # -- what passes ----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._is_cut:
                _reset(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = [
                _Direction(self, client, server, to_server=True),
                _Direction(self, server, client, to_server=False),
            ]
            with self._changed:
                self.connections += 1
                self._directions += pair
            for direction in pair:
                threading.Thread(target=direction.read, daemon=True).start()
                threading.Thread(target=direction.write, daemon=True).start()

    def _count(self, part: bytes, *, to_server: bool) -> tuple[bytes, str]:
        """Note that bytes are about to arrive; return those that do, and what happens after them."""
        if not to_server:
            self.received += len(part)
            return part, ""
        what = ""
        if self._limit is not None and self.sent + len(part) >= self._limit[0]:
            part, what = part[: self._limit[0] - self.sent], self._limit[1]
            self._limit = None
        self.sent += len(part)
        return part, what


class _Direction:
    """What goes one way through one connection."""

    def __init__(
        self, relay: Relay, source: socket.socket, sink: socket.socket, *, to_server: bool
    ) -> None:
        self.relay, self.source, self.sink, self.to_server = relay, source, sink, to_server
        # when each part arrives; an empty one is the end
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.size, self.is_over = 0, False

    def read(self) -> None:
        changed = self.relay._changed
        while True:
            try:
                part = self.source.recv(BLOCK)
            except OSError:
                part = b""
            with changed:
                changed.wait_for(lambda: self.size < WAITING or self.is_over)
                if self.is_over:
                    return
                self.waiting.append((time.monotonic() + self.relay.delay, part))
                self.size += len(part)
                changed.notify_all()
            if not part:
                return

    def write(self) -> None:
        relay = self.relay
        while True:
            with relay._changed:
                relay._changed.wait_for(
                    lambda: self.is_over or (self.waiting and not relay._stalled)
                )
                if self.is_over:
                    return
                due, part = self.waiting[0]
                if (left := due - time.monotonic()) > 0:
                    relay._changed.wait(left)
                    continue
                self.waiting.popleft()
                self.size -= len(part)
                passed, what = relay._count(part, to_server=self.to_server)
                if what == "stall":  # the rest waits for `resume`
                    relay._stalled = True
                    if rest := part[len(passed) :]:
                        self.waiting.appendleft((due, rest))
                        self.size += len(rest)
                relay._changed.notify_all()
            with suppress(OSError):
                if passed:
                    self.sink.sendall(passed)
                if not part:
                    self.sink.shutdown(socket.SHUT_WR)
            if what == "cut":
                relay.cut()
            if not part:
                return

    def reset(self) -> None:
        with self.relay._changed:
            self.is_over = True
            self.relay._changed.notify_all()
        _reset(self.source)


def _reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads
    connection.close()
