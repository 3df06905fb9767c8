"""TCP connections between agents: a star with the head agent at its center, one JSON message per
line.

A thread of its own moves the bytes and sends pings, so a busy agent (a slow file system, a slow
import) is not mistaken for a dead one. It looks only at connections that have something to say; a
timer sends the pings. Silence counts only while this side was awake: a suspended machine does not
wake up to find every other agent lost.

Others reach the head agent's port too: port scanners, another user's job, attackers. None of them
may end the run, delay it, or use up its descriptors. Until a connection has proved that it knows
the token, it has a deadline and may send a fixed number of bytes; if there are too many, the oldest
from the busiest address goes. Nothing that it sends raises an error here.
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
from collections import Counter, deque
from contextlib import suppress
from typing import Any

from paceline.agent.rendezvous.handshake import HANDSHAKE_TIMEOUT, RESPONSE_SIZE, HeadHandshake
from paceline.agent.rendezvous.network import plain_address

Message = dict[str, Any]

PING_INTERVAL = 2.0  # seconds
PROBE_TIMEOUT = 3.0  # seconds for the node of a lost agent to answer
FLUSH_TIMEOUT = 5.0  # seconds for the last messages to leave
MAX_STRANGERS = 1024  # connections that are not agents yet
ACCEPTS_PER_ROUND = 64
_PING = b"{}\n"


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class _Peer:
    """Another agent, or a stranger: a connection that has not proved yet that it is one."""

    def __init__(
        self, sock: socket.socket, *, index: int = -1, handshake: HeadHandshake | None = None
    ) -> None:
        self.sock, self.index, self.handshake = sock, index, handshake
        self.unread, self.unsent = bytearray(), bytearray()
        self.heard = 0.0  # on the transport's clock of waking time
        self.left = False  # it left on purpose, so a closed connection is not a lost agent
        self.is_open = True
        self.own_address, self.address = _addresses(sock)
        sock.setblocking(False)
        with suppress(OSError):  # it is gone already, as reading will show
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Transport:
    """Messages to and from connected agents. `send` and `poll` never block. With a listener, more
    agents arrive, until `stop_listening`.

    Members talk to the head agent alone. What arrives has the sender's index as "from". A peer
    that says goodbye arrives as {"kind": "left"}, a lost one as {"kind": "lost", "index": i,
    "reason": text, "closed": flag}, which the head agent also tells the members. If its connection
    was not closed, it was silent for too long.
    """

    def __init__(
        self,
        peers: dict[int, socket.socket],
        *,
        is_head: bool,
        silence_timeout: float,
        listener: socket.socket | None = None,
        token: str = "",
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self.silence_timeout = silence_timeout
        self._is_head = is_head
        self._listener, self._token = listener, token
        self._peers = {index: _Peer(sock, index=index) for index, sock in peers.items()}
        self._strangers: list[_Peer] = []  # the oldest first
        self._max_strangers = max_strangers
        # of all peers that were ever connected: this side's, and theirs with a port that nobody
        # listens on
        self.addresses = {
            index: (peer.own_address, peer.address) for index, peer in self._peers.items()
        }
        self._inbox: deque[Message] = deque()
        self._outbox: deque[tuple[int | None, bytes]] = deque()
        self._closing = threading.Event()
        self._accepts = True
        self._is_last = False  # what is unsent now is the last
        self._tick = min(PING_INTERVAL, silence_timeout / 4)
        self._awake = 0.0  # seconds, without those in which this machine slept
        self._inbox_read, self._inbox_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._inbox_read, self._inbox_write, self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._wake_up)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        for peer in self._peers.values():
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
        self.present = set(peers)  # the peers that are connected now
        self._thread = threading.Thread(target=self._run, name="paceline-transport", daemon=True)
        self._thread.start()

    def responds(self, index: int) -> bool:
        """Return whether the node of a peer is up. Its kernel refuses a connection even if the
        agent is gone.
        """
        try:
            socket.create_connection(self.addresses[index][1], timeout=PROBE_TIMEOUT).close()
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

    def stop_listening(self) -> None:
        """Accept no more agents."""
        self._accepts = False
        self._wake(self._wake_write)

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
            if not self._accepts:
                self._close_listener()
            self._dispatch_outbox()
        self._close_listener()
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
            peer = key.data
            if not isinstance(peer, _Peer):
                peer()
                continue
            if events & selectors.EVENT_READ and peer.is_open:
                self._receive(peer)
            if events & selectors.EVENT_WRITE and peer.is_open:
                self._flush(peer)

    def _wake_up(self) -> None:
        os.read(self._wake_read, 4096)

    def _ping(self) -> None:
        for peer in list(self._strangers):
            if self._awake - peer.heard > HANDSHAKE_TIMEOUT:
                self._drop(peer)
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
            data = peer.sock.recv(
                1 << 18 if peer.handshake is None else RESPONSE_SIZE - len(peer.unread)
            )
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, error.strerror or str(error), closed=_is_closed(error))
            return
        if not data:
            self._lose(peer, "the connection was closed", closed=True)
            return
        peer.unread += data
        if peer.handshake is not None:
            if len(peer.unread) == RESPONSE_SIZE:
                self._admit(peer, peer.handshake)
            return
        peer.heard = self._awake
        if b"\n" in data:
            *lines, rest = bytes(peer.unread).split(b"\n")
            peer.unread = bytearray(rest)
            for line in lines:
                if line != _PING[:-1]:
                    self._handle_line(peer, line)

    def _handle_line(self, peer: _Peer, line: bytes) -> None:
        message = json.loads(line)
        self._deliver({**message, "from": peer.index})
        if message.get("kind") == "left":
            peer.left = True
            self.present.discard(peer.index)

    def _lose(self, peer: _Peer, reason: str, *, closed: bool = False) -> None:
        if not self._drop(peer) or peer.left or peer.handshake is not None:
            return
        message = {"kind": "lost", "index": peer.index, "reason": reason, "closed": closed}
        # whoever finds it absent finds the reason among the messages
        self._deliver({**message, "from": peer.index})
        self.present.discard(peer.index)
        if self._is_head and not self._closing.is_set():
            self._outbox.append((None, encode(message)))

    def _drop(self, peer: _Peer) -> bool:
        """Close a connection, unless that has happened."""
        if not peer.is_open:
            return False
        peer.is_open = False
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer.handshake is not None:
            self._strangers.remove(peer)
        elif self._peers.get(peer.index) is peer:
            del self._peers[peer.index]
        return True

    # -- strangers
    # -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the peer is gone already
                self._make_room()
                return
            if len(self._strangers) >= self._max_strangers:
                self._make_room()
            handshake = HeadHandshake(self._token)
            peer = _Peer(sock, handshake=handshake)
            peer.heard = self._awake
            self._strangers.append(peer)
            self._selector.register(sock, selectors.EVENT_READ, peer)
            self._queue(peer, handshake.challenge)

    def _make_room(self) -> None:
        """Drop the oldest connection from the address that has the most. Agents are through within
        milliseconds.
        """
        hosts = Counter(each.address[0] for each in self._strangers)
        if hosts:
            busiest = hosts.most_common(1)[0][0]
            self._drop(next(each for each in self._strangers if each.address[0] == busiest))

    def _admit(self, peer: _Peer, handshake: HeadHandshake) -> None:
        """Make a stranger a peer if it knows the token."""
        if not handshake.check(bytes(peer.unread)):
            self._drop(peer)
            return
        self._strangers.remove(peer)
        peer.unread.clear()
        peer.index, peer.heard, peer.handshake = handshake.index, self._awake, None
        if peer.index in self._peers:  # it lost its first connection and joins again
            self._drop(self._peers[peer.index])
        self._peers[peer.index] = peer
        self.addresses[peer.index] = (peer.own_address, peer.address)
        self.present.add(peer.index)
        self._queue(peer, handshake.proof)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for peer in list(self._strangers):
            self._drop(peer)

    # -- what the agent reads
    # -----------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake(self._inbox_write)

    @staticmethod
    def _wake(pipe: int) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so its reader wakes up anyway
            os.write(pipe, b".")


def _addresses(sock: socket.socket) -> tuple[str, tuple[str, int]]:
    """Return this side's address, and the other side's with its port; empty if it is gone
    already.
    """
    try:
        own, peer = sock.getsockname(), sock.getpeername()
    except OSError:
        return "", ("", 0)
    return plain_address(own[0]), (plain_address(peer[0]), peer[1])


def _is_closed(error: OSError) -> bool:
    """Whether the other side's kernel has closed the connection, so that the node was still up."""
    return isinstance(error, ConnectionResetError | BrokenPipeError)
