"""TCP connections between agents: a star with the head agent at its center, one JSON message per
line.

A separate thread moves the bytes and sends pings, so a busy agent (a slow file system, a slow
import) is not mistaken for a dead one. Silence counts only while this side was awake: a suspended
machine does not wake up to find every other agent lost.
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
from typing import Any

from paceline.agent.rendezvous.handshake import STRANGER

Message = dict[str, Any]

PING_INTERVAL = 2.0  # seconds
PROBE_TIMEOUT = 3.0  # seconds for the node of a lost agent to answer
MAX_LINE = 64 << 20  # bytes; a peer that sends more without a newline is not an agent
_PING = b"{}\n"


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def read_message(sock: socket.socket, deadline: float) -> Message:
    """Read one message of an agent that has no `Transport` yet, and not a byte more."""
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
        if len(line) > MAX_LINE:
            raise ConnectionError(STRANGER)
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ConnectionError(STRANGER)
    return message


class _Peer:
    def __init__(self, index: int, sock: socket.socket) -> None:
        self.index = index
        self.sock = sock
        self.unread = bytearray()
        self.unsent = bytearray()
        self.silence = 0.0
        self.since_ping = 0.0
        self.address = _peer_address(sock)
        self.left = False  # it left on purpose, so a closed connection is not a lost agent


class Transport:
    """Messages to and from connected agents. `send` and `poll` never block.

    A lost peer arrives as {"kind": "lost", "index": i, "reason": text, "closed": flag}. If its
    connection was not closed, it was silent for too long.
    """

    def __init__(
        self,
        index: int,
        peers: dict[int, socket.socket],
        *,
        silence_timeout: float,
        inbox_pipe: tuple[int, int] | None = None,
    ) -> None:
        """`inbox_pipe` is the pipe behind `fileno`; pass one that was opened early to get a low
        descriptor.
        """
        self.index = index
        self.silence_timeout = silence_timeout
        self._peers = {number: _Peer(number, sock) for number, sock in peers.items()}
        self._present = set(peers)
        self._addresses = {peer.index: peer.address for peer in self._peers.values()}
        self._inbox: deque[Message] = deque()
        self._outbox: deque[tuple[int | None, bytes]] = deque()
        self._closing = threading.Event()
        self._flush_until = 0.0
        self._inbox_read, self._inbox_write = inbox_pipe or os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._inbox_read, self._inbox_write, self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for peer in self._peers.values():
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="paceline-transport", daemon=True)
        self._thread.start()

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def present(self) -> set[int]:
        """The peers that are connected now."""
        return set(self._present)

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
        """Send to all other agents, or to one; the head agent forwards it."""
        if self._closing.is_set():
            return
        line = encode({**message, "from": self.index, "to": to})
        self._outbox.append((to if self.is_head else 0, line))
        self._wake(self._wake_write)

    def poll(self) -> list[Message]:
        """Return the messages that arrived since the last call."""
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
        """Wait until something arrives, then `poll`."""
        select.select([self._inbox_read], [], [], max(0.0, seconds))
        return self.poll()

    def close(self, *, flush_timeout: float = 5.0) -> None:
        """Say goodbye, so that no peer takes this for a loss, and disconnect."""
        if self._closing.is_set():
            return
        self._outbox.append((None, encode({"kind": "left", "from": self.index, "to": None})))
        self._flush_until = time.monotonic() + flush_timeout
        self._closing.set()
        self._wake(self._wake_write)
        self._thread.join(flush_timeout + 5)
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
        before = time.monotonic()
        done_sending = False
        while True:
            for key, events in self._selector.select(timeout=0.5):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                    continue
                peer: _Peer = key.data
                if events & selectors.EVENT_READ:
                    self._receive(peer)
            # read before the outbox is emptied, so that the goodbye is in it
            closing = self._closing.is_set()
            self._dispatch_outbox()
            now = time.monotonic()
            # A late wake-up means that this side slept. Do not hold that time against the peers.
            awake = min(now - before, 1.0)
            before = now
            for peer in list(self._peers.values()):
                self._check_and_send(peer, awake)
            if (
                closing
                and not done_sending
                and not any(peer.unsent for peer in self._peers.values())
            ):
                done_sending = True
                self._shut_down_sending()
            if closing and (not self._peers or now > self._flush_until):
                for peer in list(self._peers.values()):
                    self._drop(peer)
                return

    def _shut_down_sending(self) -> None:
        """Close the sending half, then read until each peer closes its own.

        Closing a socket with unread bytes makes the kernel discard what was sent last.
        """
        for peer in list(self._peers.values()):
            peer.left = True
            try:
                peer.sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._drop(peer)

    def _check_and_send(self, peer: _Peer, awake: float) -> None:
        peer.silence += awake
        peer.since_ping += awake
        if peer.silence > self.silence_timeout:
            self._lose(peer, f"silent for {self.silence_timeout:g} s")
            return
        if (
            peer.since_ping >= min(PING_INTERVAL, self.silence_timeout / 4)
            and not self._closing.is_set()
        ):
            peer.since_ping = 0.0
            peer.unsent += _PING
        self._send(peer)

    def _dispatch_outbox(self) -> None:
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
            self._lose(peer, error.strerror or str(error), closed=_is_closed(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.sock, interest, peer)

    def _receive(self, peer: _Peer) -> None:
        reset = True
        try:
            while data := peer.sock.recv(1 << 16):
                peer.unread += data
            closed, reason = True, "the connection was closed"
        except BlockingIOError:
            closed, reason = False, ""
        except OSError as error:
            closed, reason = True, error.strerror or str(error)
            reset = _is_closed(error)
        peer.silence = 0.0
        *lines, rest = bytes(peer.unread).split(b"\n")
        peer.unread = bytearray(rest)
        for line in lines:
            if line != _PING[:-1]:
                self._handle_line(peer, line)
        if closed or len(rest) > MAX_LINE:
            self._lose(
                peer, reason or "it sent something that is not a message", closed=closed and reset
            )

    def _handle_line(self, peer: _Peer, line: bytes) -> None:
        try:
            message: Message = json.loads(line)
            to = message.get("to")
        except (ValueError, AttributeError, RecursionError):
            return
        if message.get("kind") == "left" and message.get("from") == peer.index:
            peer.left = True
            self._present.discard(peer.index)
        if self.is_head and to != 0:
            for other in self._peers.values():
                if other is not peer and to in (None, other.index):
                    other.unsent += line + b"\n"
        if to is None or to == self.index:
            self._deliver(message)

    def _lose(self, peer: _Peer, reason: str, *, closed: bool = False) -> None:
        self._drop(peer)
        if peer.left:
            return
        self._present.discard(peer.index)
        message = {"kind": "lost", "index": peer.index, "reason": reason, "closed": closed}
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
        self._wake(self._inbox_write)

    @staticmethod
    def _wake(pipe: int) -> None:
        try:
            os.write(pipe, b".")
        except BlockingIOError:  # the pipe is full, so its reader wakes up anyway
            pass


def _peer_address(sock: socket.socket) -> tuple[str, int] | None:
    """Return where a peer's node can be reached, with a port that nobody listens on there."""
    try:
        address = sock.getpeername()
    except OSError:
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


def _is_closed(error: OSError) -> bool:
    """Whether the other side's kernel has closed the connection, so that the node was still up."""
    return isinstance(error, ConnectionResetError | BrokenPipeError)
