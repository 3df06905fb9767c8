"""TCP connections between agents: a star with the head agent at its center, one JSON message per
line.

A thread of its own moves the bytes and sends pings, so a busy agent (a slow file system, a slow
import) is not mistaken for a dead one. It looks only at connections that have something to say; a
timer sends the pings. Silence counts only while this side was awake: a suspended machine does not
wake up to find every other agent lost.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

PING_INTERVAL = 2.0  # seconds
PROBE_TIMEOUT = 3.0  # seconds for the node of a lost agent to answer
FLUSH_TIMEOUT = 5.0  # seconds for the last messages to leave
MAX_LINE = 64 << 20  # bytes; a peer that sends more without a newline is not an agent
_PING = b"{}\n"


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class _Peer:
    def __init__(self, index: int, sock: socket.socket) -> None:
        self.index, self.sock = index, sock
        self.unread, self.unsent = bytearray(), bytearray()
        self.heard = 0.0  # on the transport's clock of waking time
        self.left = False  # it left on purpose, so a closed connection is not a lost agent
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Transport:
    """Messages to and from connected agents. `send` and `poll` never block.

    Members talk to the head agent alone. What arrives has the sender's index as "from". A peer
    that says goodbye arrives as {"kind": "left"}, a lost one as {"kind": "lost", "index": i,
    "reason": text, "closed": flag}, which the head agent also tells the members. If its connection
    was not closed, it was silent for too long.
    """

    def __init__(
        self, peers: dict[int, socket.socket], *, is_head: bool, silence_timeout: float
    ) -> None:
        self.silence_timeout = silence_timeout
        self._is_head = is_head
        self._peers = {index: _Peer(index, sock) for index, sock in peers.items()}
        self._addresses = {index: _address(sock) for index, sock in peers.items()}
        self._inbox: deque[Message] = deque()
        self._outbox: deque[tuple[int | None, bytes]] = deque()
        self._closing = threading.Event()
        self._is_last = False  # what is unsent now is the last
        self._tick = min(PING_INTERVAL, silence_timeout / 4)
        self._awake = 0.0  # seconds, without those in which this machine slept
        self._inbox_read, self._inbox_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._inbox_read, self._inbox_write, self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for peer in self._peers.values():
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        self.present = set(peers)  # the peers that are connected now
        self._thread = threading.Thread(target=self._run, name="paceline-transport", daemon=True)
        self._thread.start()

    def responds(self, index: int) -> bool:
        """Return whether the node of a peer is up. Its kernel refuses a connection even if the
        agent is gone.
        """
        address = self._addresses.get(index)
        if address is None:
            return False
        try:
            socket.create_connection(address, timeout=PROBE_TIMEOUT).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return True

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something."""
        return self._inbox_read

    def send(self, message: Message, *, to: int | None = None) -> None:
        """Send to one peer, or to all."""
        if not self._closing.is_set():
            self._outbox.append((to, encode(message)))
            self._wake(self._wake_write)

    def poll(self) -> list[Message]:
        """Return the messages that have arrived."""
        with suppress(BlockingIOError):
            while not self._closing.is_set() and os.read(self._inbox_read, 4096):
                pass
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def wait(self, seconds: float) -> list[Message]:
        """Wait until something arrives, then `poll`."""
        poller = select.poll()  # unlike `select`, it takes descriptors above 1023
        poller.register(self._inbox_read, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        return self.poll()

    def close(self) -> None:
        """Say goodbye, so that no peer takes this for a loss, and disconnect."""
        if self._closing.is_set():
            return
        self._outbox.append((None, encode({"kind": "left"})))
        self._closing.set()
        self._wake(self._wake_write)
        self._thread.join(2 * FLUSH_TIMEOUT)
        # otherwise it still uses them; being a daemon, it ends with the process
        if not self._thread.is_alive():
            self._selector.close()
            for end in (self._inbox_read, self._inbox_write, self._wake_read, self._wake_write):
                os.close(end)

    # -- the thread
    # ------------------------------------------------------------------------------------

    def _run(self) -> None:
        # signals belong to the main thread
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        now = next_ping = time.monotonic()
        while not self._closing.is_set():
            self._serve(max(0.0, next_ping - now))
            before, now = now, time.monotonic()
            # A late wake-up means that this side slept. Do not hold that time against the peers.
            self._awake += min(now - before, self._tick + 0.5)
            if now >= next_ping:
                next_ping = now + self._tick
                self._ping()
            self._dispatch_outbox()
        self._dispatch_outbox()
        self._hang_up(time.monotonic() + FLUSH_TIMEOUT)

    def _hang_up(self, deadline: float) -> None:
        """Send what is left and close the sending half, then read until each peer closes its own.

        Closing a socket with unread bytes makes the kernel discard what was sent last.
        """
        self._is_last = True
        for peer in list(self._peers.values()):
            peer.left = True
            self._flush(peer)
        while self._peers and (left := deadline - time.monotonic()) > 0:
            self._serve(left)
        for peer in list(self._peers.values()):
            self._drop(peer)

    def _serve(self, seconds: float) -> None:
        """Wait for connections that have something to say or room for more, and serve them."""
        for key, events in self._selector.select(seconds):
            if key.data is None:
                os.read(self._wake_read, 4096)
                continue
            if events & selectors.EVENT_READ:
                self._receive(key.data)
            if events & selectors.EVENT_WRITE and key.data.index in self._peers:
                self._flush(key.data)

    def _ping(self) -> None:
        for peer in list(self._peers.values()):
            if self._awake - peer.heard > self.silence_timeout:
                self._lose(peer, f"silent for {self.silence_timeout:g} s")
            elif not peer.unsent:
                self._queue(peer, _PING)

    def _dispatch_outbox(self) -> None:
        while self._outbox:
            to, line = self._outbox.popleft()
            peers = list(self._peers.values()) if to is None else [self._peers.get(to)]
            for peer in peers:
                if peer is not None:
                    self._queue(peer, line)

    def _queue(self, peer: _Peer, line: bytes) -> None:
        peer.unsent += line
        if len(peer.unsent) == len(line):  # otherwise the selector waits for room
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            if peer.unsent:
                del peer.unsent[: peer.sock.send(peer.unsent)]
            if self._is_last and not peer.unsent:
                peer.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, error.strerror or str(error), closed=_is_closed(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, error.strerror or str(error), closed=_is_closed(error))
            return
        if not data:
            self._lose(peer, "the connection was closed", closed=True)
            return
        peer.heard = self._awake
        peer.unread += data
        if b"\n" in data:
            *lines, rest = bytes(peer.unread).split(b"\n")
            peer.unread = bytearray(rest)
            for line in lines:
                if line != _PING[:-1]:
                    self._handle_line(peer, line)
        if len(peer.unread) > MAX_LINE:
            self._lose(peer, "it sent something that is not a message")

    def _handle_line(self, peer: _Peer, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(message, dict):
            self._deliver({**message, "from": peer.index})
            if message.get("kind") == "left":
                peer.left = True
                self.present.discard(peer.index)

    def _lose(self, peer: _Peer, reason: str, *, closed: bool = False) -> None:
        if not self._drop(peer) or peer.left:
            return
        message = {"kind": "lost", "index": peer.index, "reason": reason, "closed": closed}
        # whoever finds it absent finds the reason among the messages
        self._deliver({**message, "from": peer.index})
        self.present.discard(peer.index)
        if self._is_head and not self._closing.is_set():
            self._outbox.append((None, encode(message)))

    def _drop(self, peer: _Peer) -> bool:
        """Close a connection, unless that has happened."""
        if self._peers.pop(peer.index, None) is None:
            return False
        self._selector.unregister(peer.sock)
        peer.sock.close()
        return True

    def _deliver(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake(self._inbox_write)

    @staticmethod
    def _wake(pipe: int) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so its reader wakes up anyway
            os.write(pipe, b".")


def _address(sock: socket.socket) -> tuple[str, int] | None:
    """Return where a peer's node can be reached, with a port that nobody listens on there."""
    try:
        address = sock.getpeername()
    except OSError:
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


def _is_closed(error: OSError) -> bool:
    """Whether the other side's kernel has closed the connection, so that the node was still up."""
    return isinstance(error, ConnectionResetError | BrokenPipeError)
