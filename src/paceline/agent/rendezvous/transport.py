"""A star of TCP connections between agents: the head in the middle, newline-framed JSON on the lines.

A thread of its own carries the bytes and the pings, so that a agent that is busy (a slow file system, a
slow import) is not taken for dead. Silence is counted only while this side was awake itself: a machine that
was suspended does not wake to find everybody lost.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections import deque
from typing import Any

Message = dict[str, Any]

PING_EVERY = 2.0  # seconds
LONGEST_LINE = 64 << 20  # a peer that sends more without a line's end is not one of ours
_PING = b"{}\n"


def prove(token: str, nonce: str, index: int) -> str:
    """Shows that one knows the token without sending it."""
    return hmac.new(token.encode(), f"{nonce} {index}".encode(), "sha256").hexdigest()


def same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def read_line(sock: socket.socket, deadline: float) -> Message:
    """One message from a socket that is not in a `Link` yet. What follows the line is left for the link."""
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        seen = sock.recv(1 << 16, socket.MSG_PEEK)
        if not seen:
            raise ConnectionError("the connection was closed")
        line += sock.recv(seen.find(b"\n") + 1 or len(seen))
        if len(line) > LONGEST_LINE:
            raise ConnectionError("not one of ours")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ConnectionError("not one of ours")
    return message


class _Peer:
    def __init__(self, index: int, sock: socket.socket) -> None:
        self.index = index
        self.sock = sock
        self.unread = bytearray()
        self.unsent = bytearray()
        self.silence = 0.0
        self.since_ping = 0.0
        self.left = False  # said goodbye: its end is no loss


class Link:
    """Joined peers. `say` and `poll` never block; a lost peer arrives as {"kind": "lost", "index": i}."""

    def __init__(
        self, me: int, peers: dict[int, socket.socket], *, silence: float, bell: tuple[int, int] | None = None
    ) -> None:
        """`bell` is the pipe behind `fileno`, where the caller wants to have made it (and so numbered it) itself."""
        self.me = me
        self.silence = silence
        self._peers = {index: _Peer(index, sock) for index, sock in peers.items()}
        self._present = set(peers)
        self._inbox: deque[Message] = deque()
        self._outbox: deque[tuple[int | None, bytes]] = deque()
        self._closing = threading.Event()
        self._flush_until = 0.0
        self._inbox_read, self._inbox_write = bell or os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._inbox_read, self._inbox_write, self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._carry, name="paceline-link", daemon=True)
        self._thread.start()

    @property
    def is_head(self) -> bool:
        return self.me == 0

    @property
    def present(self) -> set[int]:
        """Peers that are connected now."""
        return set(self._present)

    def fileno(self) -> int:
        """Readable when `poll` has something."""
        return self._inbox_read

    def say(self, message: Message, *, to: int | None = None) -> None:
        """To everybody else, or to one agent; through the head."""
        if self._closing.is_set():
            return
        line = encode({**message, "from": self.me, "to": to})
        self._outbox.append((to if self.is_head else 0, line))
        self._poke(self._wake_write)

    def poll(self) -> list[Message]:
        """What has arrived since the last call."""
        try:
            while not self._closing.is_set() and os.read(self._inbox_read, 4096):
                pass
        except BlockingIOError:
            pass
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def wait(self, seconds: float) -> list[Message]:
        """`poll`, after waiting for something to arrive."""
        select.select([self._inbox_read], [], [], max(0.0, seconds))
        return self.poll()

    def close(self, *, flush_within: float = 5.0) -> None:
        """Say goodbye, so that nobody takes this for a loss, and hang up."""
        if self._closing.is_set():
            return
        self._outbox.append((None, encode({"kind": "left", "from": self.me, "to": None})))
        self._flush_until = time.monotonic() + flush_within
        self._closing.set()
        self._poke(self._wake_write)
        self._thread.join(flush_within + 5)
        if not self._thread.is_alive():  # else it still uses them; it is a daemon, and ends with the process
            self._selector.close()
            for end in (self._inbox_read, self._inbox_write, self._wake_read, self._wake_write):
                os.close(end)

    # -- the carrying thread ---------------------------------------------------------------------------

    def _carry(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        before = time.monotonic()
        hung_up = False
        while True:
            for key, events in self._selector.select(timeout=0.5):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    continue
                peer: _Peer = key.data
                if events & selectors.EVENT_READ:
                    self._receive(peer)
            closing = self._closing.is_set()  # asked before the outbox is emptied: the goodbye is then in it
            self._sort_outbox()
            now = time.monotonic()
            # Late means that this side slept: nobody else is to blame for that time.
            awake = min(now - before, 1.0)
            before = now
            for peer in list(self._peers.values()):
                self._look_after(peer, awake)
            if closing and not hung_up and not any(peer.unsent for peer in self._peers.values()):
                hung_up = True
                self._hang_up()
            if closing and (not self._peers or now > self._flush_until):
                for peer in list(self._peers.values()):
                    self._drop(peer)
                return

    def _hang_up(self) -> None:
        """End the sending half, then read on until the peer ends its own: closing with bytes unread would make
        the kernel throw away what was sent last."""
        for peer in list(self._peers.values()):
            peer.left = True
            try:
                peer.sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._drop(peer)

    def _look_after(self, peer: _Peer, awake: float) -> None:
        peer.silence += awake
        peer.since_ping += awake
        if peer.silence > self.silence:
            self._lose(peer, f"silent for {self.silence:g} s")
            return
        if peer.since_ping >= min(PING_EVERY, self.silence / 4) and not self._closing.is_set():
            peer.since_ping = 0.0
            peer.unsent += _PING
        self._send(peer)

    def _sort_outbox(self) -> None:
        while self._outbox:
            to, line = self._outbox.popleft()
            for peer in self._peers.values():
                if to is None or to == peer.index:
                    peer.unsent += line

    def _send(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                sent = peer.sock.send(peer.unsent)
                del peer.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, error.strerror or str(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.sock, interest, peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            while piece := peer.sock.recv(1 << 16):
                peer.unread += piece
            over, why = True, "the connection was closed"
        except BlockingIOError:
            over, why = False, ""
        except OSError as error:
            over, why = True, error.strerror or str(error)
        peer.silence = 0.0
        *lines, rest = bytes(peer.unread).split(b"\n")
        peer.unread = bytearray(rest)
        for line in lines:
            if line != _PING[:-1]:
                self._take(peer, line)
        if over or len(rest) > LONGEST_LINE:
            self._lose(peer, why or "it sent what is no message")

    def _take(self, peer: _Peer, line: bytes) -> None:
        try:
            message: Message = json.loads(line)
            to = message.get("to")
        except (ValueError, AttributeError):
            return
        if message.get("kind") == "left" and message.get("from") == peer.index:
            peer.left = True
            self._present.discard(peer.index)
        if self.is_head and to != 0:
            for other in self._peers.values():
                if other is not peer and to in (None, other.index):
                    other.unsent += line + b"\n"
        if to is None or to == self.me:
            self._deliver(message)

    def _lose(self, peer: _Peer, why: str) -> None:
        self._drop(peer)
        if peer.left:
            return
        self._present.discard(peer.index)
        message = {"kind": "lost", "index": peer.index, "why": why}
        self._deliver(message)
        if self.is_head and not self._closing.is_set():
            line = encode(message)
            for other in self._peers.values():
                other.unsent += line

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.index, None) is not None:
            self._selector.unregister(peer.sock)
            peer.sock.close()

    def _deliver(self, message: Message) -> None:
        self._inbox.append(message)
        self._poke(self._inbox_write)

    @staticmethod
    def _poke(pipe: int) -> None:
        try:
            os.write(pipe, b".")
        except BlockingIOError:  # full of pokes: the reader will wake anyway
            pass
