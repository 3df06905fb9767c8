"""How launchers find each other: the head lets in who knows the token, a member tries until it is let in."""

from __future__ import annotations

import ipaddress
import json
import secrets
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline import contract
from paceline.errors import LaunchError
from paceline.node import network
from paceline.node.link import encode, prove, read_line, same
from paceline.node.network import LOOPBACK
from paceline.node.place import Absent, Interrupted, Place, await_verdict, host_of_node, leg_folder

Facts = dict[str, Any]

RESOLVE_WITHIN = 10.0  # name services hiccup; longer than this is a node that cannot see the head
HANDSHAKE_WITHIN = 5.0  # for one connection: a port scanner must not keep the others waiting for long
WAITING = "interrupted while waiting for the other launchers"


@dataclass(frozen=True)
class Joined:
    """All are connected: the sockets (the head's to all, a member's to the head) and what was learnt."""

    sockets: dict[int, socket.socket]
    roster: list[Facts]
    addr: str  # of the head, as the members reach it
    peer: str  # an address on another node


class Dismissed(LaunchError):
    """The head turned this launcher away, and so knows about it."""


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f'the head is said to be at "{text}"; expected "host:port"')
    return host.strip("[]"), int(port)


# -- the head ------------------------------------------------------------------------------------------


class Host:
    """The head while it gathers the others."""

    def __init__(
        self, place: Place, environ: Mapping[str, str], *, token: str, give_up: Callable[[], bool]
    ) -> None:
        self.place = place
        self.environ = environ
        self.token = token
        self.give_up = give_up
        self.leg = leg_folder(environ)
        self.members: dict[int, socket.socket] = {}
        self.facts: dict[int, Facts] = {}

    def gather(self, facts: Facts, patience: float) -> Joined:
        self.facts[0] = facts
        deadline = time.monotonic() + patience
        try:
            with self._listen() as listener:
                listener.settimeout(0.5)
                while len(self.facts) < self.place.count:
                    if self.give_up():
                        raise Interrupted(WAITING)
                    self._heed_complaints()
                    if time.monotonic() > deadline:
                        raise self._missing(patience)
                    try:
                        sock, _ = listener.accept()
                    except TimeoutError:
                        continue
                    self._admit(sock)
        except BaseException as error:
            self._dismiss(str(error))
            raise
        roster = [self.facts[index] for index in range(self.place.count)]
        addr, peer = _ways(self.members)
        for sock in self.members.values():
            try:
                sock.settimeout(HANDSHAKE_WITHIN)
                sock.sendall(encode({"kind": "roster", "roster": roster, "addr": addr}))
            except OSError:  # the link will find that it is lost
                continue
        return Joined(self.members, roster, addr, peer)

    def _listen(self) -> socket.socket:
        """On the port that was announced; if somebody took it since, on another, told through the leg's folder."""
        announced = self.environ.get(contract.HEAD)
        host, port = _host_and_port(announced) if announced else (self.place.host, 0)
        if self.leg is None and not announced:
            raise LaunchError(f"neither {contract.HEAD} nor {contract.LEG} is set: the launchers cannot meet")
        try:
            listener = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            if self.leg is None:
                raise LaunchError(f"port {port} on {self.place.host} is taken: {error.strerror}") from None
            listener = socket.create_server(("", 0), backlog=1024)
        if self.leg is not None:
            self.leg.path.mkdir(parents=True, exist_ok=True)
            contract.write_atomically(self.leg.head, f"{host}:{listener.getsockname()[1]}\n")
        return listener

    def _admit(self, sock: socket.socket) -> None:
        """Let one in that knows the token; anybody else is turned away and changes nothing."""
        nonce = secrets.token_hex(16)
        try:
            sock.settimeout(HANDSHAKE_WITHIN)
            sock.sendall(encode({"paceline": 1, "nonce": nonce}))
            answer = read_line(sock, time.monotonic() + HANDSHAKE_WITHIN)
            index, facts = int(answer["index"]), dict(answer["facts"])
            if not same(str(answer["proof"]), prove(self.token, nonce, index)):
                raise PermissionError("wrong token")
            if not 0 < index < self.place.count or answer["count"] != self.place.count:
                why = f"it is number {index} of {answer['count']}, but the head expects {self.place.count} launchers"
                sock.sendall(encode({"kind": "refused", "why": why}))
                raise PermissionError(why)
            sock.sendall(encode({"kind": "welcome", "proof": prove(self.token, str(answer["nonce"]), 0)}))
        except (OSError, ValueError, KeyError, TypeError):
            sock.close()
            return
        if index in self.members:  # it lost its first connection and came again
            self.members[index].close()
        self.members[index] = sock
        self.facts[index] = facts

    def _heed_complaints(self) -> None:
        """A member that cannot get here says so in the leg's folder, so that the head need not wait for it."""
        if self.leg is None:
            return
        for path in sorted(self.leg.path.glob("trouble-*")):
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            raise Absent(told["message"], hint=told["hint"], hosts=[told["host"]])

    def _missing(self, patience: float) -> Absent:
        count, nodes = self.place.count, self.place.nodes
        words, hosts = [], []
        for index in range(1, count):
            if index not in self.facts:
                node = index * nodes // count
                host = host_of_node(node, self.environ)
                hosts += [host] if host and host not in hosts else []
                words.append(f"node {host or node} (launcher {index + 1} of {count})")
        named = ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
        return Absent(
            f"{named} never joined within {patience:g} s",
            hint="the node did not start, or cannot reach the head: look at its lines in the job's log",
            hosts=hosts,
        )

    def _dismiss(self, why: str) -> None:
        for sock in self.members.values():
            try:
                sock.settimeout(HANDSHAKE_WITHIN)
                sock.sendall(encode({"kind": "refused", "why": why}))
            except OSError:
                pass
            sock.close()


def _ways(members: dict[int, socket.socket]) -> tuple[str, str]:
    """The head's address as most members reached it, and the address of one that stands on another machine."""
    elsewhere = []
    for sock in members.values():
        try:
            mine, theirs = sock.getsockname()[0], sock.getpeername()[0]
        except OSError:  # it is gone already: the link will find out
            continue
        # A host that resolves its own name to 127.0.1.1 must not tell the others to meet there.
        if mine != theirs and not ipaddress.ip_address(mine).is_loopback:
            elsewhere.append((mine, theirs))
    if not elsewhere:
        return LOOPBACK, LOOPBACK
    addr = Counter(mine for mine, _ in elsewhere).most_common(1)[0][0]
    return addr, next(theirs for mine, theirs in elsewhere if mine == addr)


# -- a member ------------------------------------------------------------------------------------------


class Visitor:
    """A member while it tries to be let in."""

    def __init__(
        self, place: Place, environ: Mapping[str, str], *, token: str, give_up: Callable[[], bool]
    ) -> None:
        self.place = place
        self.environ = environ
        self.token = token
        self.give_up = give_up
        self.leg = leg_folder(environ)
        self.name = f"launcher {place.index + 1} of {place.count} on node {place.host}"
        self.unresolved_since: float | None = None

    def visit(self, facts: Facts, patience: float) -> Joined:
        """Try the announced address, and the one in the leg's folder, until the head lets this launcher in."""
        deadline = time.monotonic() + patience
        last, tried = "nobody has said where the head is", "?"
        while time.monotonic() < deadline:
            if self.give_up():
                raise Interrupted(WAITING)
            for tried in self._candidates():
                try:
                    return self._enter(tried, facts, patience)
                except (OSError, ValueError, KeyError) as error:
                    last = str(error)
            time.sleep(0.2)
        raise LaunchError(
            f"{self.name} could not join the head at {tried} within {patience:g} s: {last}",
            hint="is that address reachable from this node, and is the head's launcher running?",
        )

    def _candidates(self) -> list[str]:
        found = []
        if self.leg is not None:
            try:
                found.append(self.leg.head.read_text(encoding="utf-8").strip())
            except OSError:
                pass
        if contract.HEAD in self.environ and self.environ[contract.HEAD] not in found:
            found.append(self.environ[contract.HEAD])
        return [where for where in found if where]

    def _enter(self, where: str, facts: Facts, patience: float) -> Joined:
        host, port = _host_and_port(where)
        address = self._resolve(host, min(RESOLVE_WITHIN, patience / 2))
        sock = socket.create_connection((address, port), timeout=HANDSHAKE_WITHIN)
        try:
            told = self._shake_hands(sock, facts, patience)
        except BaseException:
            sock.close()
            raise
        return Joined({0: sock}, told["roster"], told["addr"], sock.getpeername()[0])

    def _resolve(self, host: str, within: float) -> str:
        try:
            address = network.resolve(host, asked_by=self.name)
        except LaunchError as error:
            self.unresolved_since = self.unresolved_since or time.monotonic()
            if time.monotonic() - self.unresolved_since > within:
                raise
            raise OSError(error.message) from None
        self.unresolved_since = None
        return address

    def _shake_hands(self, sock: socket.socket, facts: Facts, patience: float) -> dict[str, Any]:
        place = self.place
        greeting = read_line(sock, time.monotonic() + HANDSHAKE_WITHIN)
        nonce = secrets.token_hex(16)
        proof = prove(self.token, str(greeting["nonce"]), place.index)
        sock.sendall(
            encode(
                {"index": place.index, "count": place.count, "nonce": nonce, "proof": proof, "facts": facts}
            )
        )
        welcome = read_line(sock, time.monotonic() + HANDSHAKE_WITHIN)
        if welcome.get("kind") == "refused":
            raise Dismissed(f"the head turned {self.name} away: {welcome['why']}")
        if not same(str(welcome["proof"]), prove(self.token, nonce, 0)):
            raise PermissionError("it does not know the token: another run's head")
        told = self._await_roster(sock, time.monotonic() + patience + HANDSHAKE_WITHIN)
        if told.get("kind") == "refused":
            raise Dismissed(str(told["why"]))
        return told

    def _await_roster(self, sock: socket.socket, deadline: float) -> dict[str, Any]:
        """From here the head counts the time: it knows who is missing."""
        while not select.select([sock], [], [], 0.5)[0]:
            if self.give_up():
                raise Interrupted(WAITING)
            if time.monotonic() > deadline:
                raise TimeoutError("the head did not say who is here")
        return read_line(sock, deadline)

    def complain(self, error: LaunchError) -> None:
        """Tell the head by file what could not be told by wire, and give it time to end the run with a verdict: a
        launcher that exits at once may have its whole step ended by the scheduler first."""
        if self.leg is None or isinstance(error, Interrupted):
            return
        if not isinstance(error, Dismissed):
            message = {"host": self.place.host, "message": error.message, "hint": error.hint}
            try:
                self.leg.path.mkdir(parents=True, exist_ok=True)
                contract.write_atomically(self.leg.path / f"trouble-{self.place.index}", json.dumps(message))
            except OSError as problem:
                print(f"paceline: {self.leg.path} cannot be written: {problem.strerror}", file=sys.stderr)
                return
        await_verdict(self.leg, self.give_up)
