"""The server side of the rendezvous: the head agent accepts the others and knows who is missing.

Others reach its port too: port scanners, another user's job, attackers. None of them may end the
run, delay it, or use up its descriptors. The head agent reads many connections at once. Each has a
deadline and may send a fixed number of bytes until it has proved that it knows the token; if there
are too many, the oldest from the busiest address goes. Nothing that a connection sends raises an
error here.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from paceline.agent.launcher_placement import Placement, node_name
from paceline.agent.rendezvous.handshake import RESPONSE_SIZE, SIZE_DIGITS, HeadHandshake
from paceline.agent.rendezvous.membership import (
    HANDSHAKE_TIMEOUT,
    INTERRUPTED,
    AgentsMissing,
    Facts,
    Interrupted,
    Membership,
    encode_roster,
    job_start_folder,
    split_address,
)
from paceline.agent.rendezvous.network import bind_port, join_address, loopback, plain_address
from paceline.agent.workers.process_tree import raise_descriptor_limit
from paceline.contract import env
from paceline.contract.run_folder import write_atomically
from paceline.errors import LaunchError

MAX_STRANGERS = 1024  # connections that are not agents yet
SPARE_DESCRIPTORS = 256
ACCEPTS_PER_ROUND = 64
MAX_HELLO = 16 << 20  # bytes; what an agent says about its node is far smaller
LOOK_INTERVAL = 0.5  # seconds between two looks for agents that report an error
MAX_NAMES = 8  # agents that a message names


class _Connection:
    """A connection that is no member yet."""

    def __init__(self, sock: socket.socket, address: str, token: str) -> None:
        self.sock, self.address = sock, address
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self.handshake = HeadHandshake(token)
        self.received = bytearray()
        self.knows_token = False


class RendezvousServer:
    """Accepts all other agents of the run."""

    def __init__(
        self,
        placement: Placement,
        environ: Mapping[str, str],
        *,
        token: str,
        interrupted: Callable[[], bool],
    ) -> None:
        self.placement, self.environ, self.token = placement, environ, token
        self.interrupted = interrupted
        self.job_start = job_start_folder(environ)
        self.members: dict[int, socket.socket] = {}
        self.facts: dict[int, Facts] = {}
        # by descriptor, the oldest first
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        allowed = raise_descriptor_limit(placement.count + SPARE_DESCRIPTORS + MAX_STRANGERS)
        self._max_strangers = max(
            16, min(MAX_STRANGERS, allowed - placement.count - SPARE_DESCRIPTORS)
        )

    def accept_all(self, facts: Facts, timeout: float) -> Membership:
        """Wait until all agents have joined, then send everyone the roster.

        As long as agents arrive, more may come: the time-out counts from the last one.
        """
        self.facts[0] = facts
        deadline, arrived, next_look = time.monotonic() + timeout, 1, 0.0
        try:
            with self._selector, self._listen() as listener:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
                while len(self.facts) < self.placement.count:
                    if self.interrupted():
                        raise Interrupted(INTERRUPTED)
                    now = time.monotonic()
                    if now > next_look:
                        next_look = now + LOOK_INTERVAL
                        self._raise_reported_error()
                    if len(self.facts) > arrived:
                        deadline, arrived = now + timeout, len(self.facts)
                    if now > deadline:
                        raise self._missing(timeout)
                    self._serve(listener)
                for connection in list(self._connections.values()):
                    self._drop(connection)
        except BaseException as error:
            for sock in self.members.values():
                _reject(sock, str(error))
            raise
        roster = [self.facts[index] for index in range(self.placement.count)]
        head_address, peer_address = choose_addresses(self.members)
        answer = _encode_answer(
            {"kind": "roster", "roster": encode_roster(roster), "head_address": head_address}
        )
        for sock in self.members.values():
            with suppress(OSError):  # the transport will find that it is lost
                sock.settimeout(HANDSHAKE_TIMEOUT)
                sock.sendall(answer)
        return Membership(self.members, roster, head_address, peer_address)

    def _listen(self) -> socket.socket:
        """Listen on the announced port, or on another if that is taken; write which one to the job
        start's folder.
        """
        announced = self.environ.get(env.RENDEZVOUS)
        host, port = split_address(announced) if announced else (self.placement.host, 0)
        if self.job_start is None and not announced:
            raise LaunchError(
                f"The agents cannot find each other: neither {env.RENDEZVOUS} nor {env.JOB_START} "
                "is set.",
                hint="Start agents with `paceline run` or `paceline submit`.",
            )
        try:
            listener = bind_port(port, backlog=1024)
        except OSError as error:
            if self.job_start is None:
                raise LaunchError(
                    f"Cannot listen on port {port} of {self.placement.host}: {error.strerror}."
                ) from None
            listener = bind_port(0, backlog=1024)
        if self.job_start is not None:
            self.job_start.path.mkdir(parents=True, exist_ok=True)
            write_atomically(
                self.job_start.head, f"{join_address(host, listener.getsockname()[1])}\n"
            )
        return listener

    # -- strangers
    # -------------------------------------------------------------------------------------

    def _serve(self, listener: socket.socket) -> None:
        """Wait a moment for connections, and make those that know the token members."""
        for key, _ in self._selector.select(0.5):
            connection: _Connection | None = key.data
            if connection is None:
                self._accept(listener)
            elif self._connections.get(key.fd) is connection:  # not dropped to make room
                self._read(connection)
        now = time.monotonic()
        for connection in [each for each in self._connections.values() if now > each.deadline]:
            self._drop(connection)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors, or the peer is gone already
                self._make_room()
                return
            if len(self._connections) >= self._max_strangers:
                self._make_room()
            connection = _Connection(sock, str(address[0]), self.token)
            try:
                sock.setblocking(False)
                sock.send(connection.handshake.challenge)  # a new connection has room for it
            except OSError:
                sock.close()
                continue
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _make_room(self) -> None:
        """Drop the oldest connection from the address that has the most. Agents are through within
        milliseconds.
        """
        strangers = [each for each in self._connections.values() if not each.knows_token]
        if strangers:
            busiest = Counter(each.address for each in strangers).most_common(1)[0][0]
            self._drop(next(each for each in strangers if each.address == busiest))

    def _read(self, connection: _Connection) -> None:
        """Read what a connection may send: first its response, then what it says about itself."""
        received = connection.received
        size = (1 << 16) if connection.knows_token else RESPONSE_SIZE - len(received)
        try:
            data = connection.sock.recv(size)
            received += data
            if not data or len(received) > MAX_HELLO:
                self._drop(connection)
            elif not connection.knows_token and len(received) == RESPONSE_SIZE:
                if not connection.handshake.check(bytes(received)):
                    self._drop(connection)
                    return
                connection.sock.send(connection.handshake.proof)
                connection.knows_token = True
                received.clear()
            elif connection.knows_token and received.endswith(b"\n"):
                self._admit(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _admit(self, connection: _Connection) -> None:
        """Make an agent that knows the token a member, unless it is not one of this run's."""
        index, count = connection.handshake.index, self.placement.count
        try:
            hello = json.loads(connection.received)
            theirs, facts = hello["count"], hello["facts"]
        except (ValueError, RecursionError, TypeError, KeyError):
            self._drop(connection)
            return
        self._forget(connection)
        sock = connection.sock
        sock.setblocking(True)
        if not 0 < index < count or theirs != count or not isinstance(facts, dict):
            reason = f"It has index {index} of {theirs}, but the head agent expects {count} agents."
            _reject(sock, reason)
            return
        if index in self.members:  # it lost its first connection and joins again
            self.members[index].close()
        self.members[index], self.facts[index] = sock, facts

    def _forget(self, connection: _Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        self._connections.pop(connection.sock.fileno(), None)

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.sock.close()

    # -- those that do not come
    # -------------------------------------------------------------------------

    def _raise_reported_error(self) -> None:
        """Raise the error of an agent that cannot get here, instead of waiting for it."""
        if self.job_start is None:
            return
        for path in self.job_start.join_errors():
            with suppress(OSError, ValueError):
                report = json.loads(path.read_text(encoding="utf-8"))
                raise AgentsMissing(report["message"], hint=report["hint"], hosts=[report["host"]])

    def _missing(self, timeout: float) -> AgentsMissing:
        count, nodes = self.placement.count, self.placement.nodes
        names, hosts = [], []
        for index in sorted(set(range(count)) - set(self.facts)):
            node = index * nodes // count
            host = node_name(node, self.environ)
            hosts += [host] if host and host not in hosts else []
            names.append(f"node {host or node} (agent {index + 1} of {count})")
        listed = ", ".join(names[:MAX_NAMES])
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return AgentsMissing(
            f"Agents did not join within {timeout:g} s: {listed}{more}.",
            hint="A node did not start, or cannot reach the head node: read its lines in the "
            "job's log. If nodes start later than that, set --join-timeout.",
            hosts=hosts,
        )


def _encode_answer(answer: dict[str, str]) -> bytes:
    line = json.dumps(answer).encode()
    return f"{len(line):0{SIZE_DIGITS}}".encode() + line


def _reject(sock: socket.socket, reason: str) -> None:
    with suppress(OSError):
        sock.settimeout(HANDSHAKE_TIMEOUT)
        sock.sendall(_encode_answer({"kind": "rejected", "reason": reason}))
    sock.close()


def choose_addresses(members: Mapping[int, socket.socket]) -> tuple[str, str]:
    """Return the head agent's address as most members reach it, and the address of a member on
    another node.
    """
    import ipaddress  # a single agent does without

    remote = []
    for sock in members.values():
        try:
            own, peer = (plain_address(end()[0]) for end in (sock.getsockname, sock.getpeername))
        except OSError:  # it is gone already, as the transport will find
            continue
        # A host that resolves its own name to 127.0.1.1 must not announce that address to the
        # others.
        if own != peer and not ipaddress.ip_address(own).is_loopback:
            remote.append((own, peer))
    if not remote:
        return loopback(), loopback()
    address = Counter(own for own, _ in remote).most_common(1)[0][0]
    return address, next(peer for own, peer in remote if own == address)
