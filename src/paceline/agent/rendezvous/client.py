"""How a agent joins: it tries until the head lets it in, or says where the head can read it that it cannot."""

from __future__ import annotations

import base64
import json
import secrets
import select
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.agent.placement import Interrupted, Place, await_verdict, job_start_folder
from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.transport import encode, prove, read_line, same
from paceline.contract import env
from paceline.contract.run_folder import write_atomically
from paceline.errors import LaunchError

Facts = dict[str, Any]

RESOLVE_WITHIN = 10.0  # name services hiccup; longer than this is a node that cannot see the head
HANDSHAKE_WITHIN = 5.0  # for one connection: a port scanner must not keep the others waiting for long
WAITING = "interrupted while waiting for the other agents"


@dataclass(frozen=True)
class Joined:
    """All are connected: the sockets (the head's to all, a member's to the head) and what was learnt."""

    sockets: dict[int, socket.socket]
    roster: list[Facts]
    addr: str  # of the head, as the members reach it
    peer: str  # an address on another node


class Dismissed(LaunchError):
    """The head turned this agent away, and so knows about it."""


def host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f'the head is said to be at "{text}"; expected "host:port"')
    return host.strip("[]"), int(port)


def pack(roster: list[Facts]) -> str:
    """Everybody gets everybody's facts: thousands of nodes that are much alike make a small packet."""
    return base64.b64encode(zlib.compress(json.dumps(roster).encode(), 6)).decode()


def unpack(packet: str) -> list[Facts]:
    roster: list[Facts] = json.loads(zlib.decompress(base64.b64decode(packet)))
    return roster


class Visitor:
    """A member while it tries to be let in."""

    def __init__(
        self, place: Place, environ: Mapping[str, str], *, token: str, give_up: Callable[[], bool]
    ) -> None:
        self.place = place
        self.environ = environ
        self.token = token
        self.give_up = give_up
        self.job_start = job_start_folder(environ)
        self.name = f"agent {place.index + 1} of {place.count} on node {place.host}"
        self.unresolved_since: float | None = None

    def visit(self, facts: Facts, patience: float) -> Joined:
        """Be let in, or complain where the head can read it."""
        try:
            return self._knock(facts, patience)
        except LaunchError as error:
            self._complain(error)
            raise

    def _knock(self, facts: Facts, patience: float) -> Joined:
        """Try the announced address, and the one in the job start's folder, until the head lets this agent in."""
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
            hint="is that address reachable from this node, and is the head's agent running?",
        )

    def _candidates(self) -> list[str]:
        found = []
        if self.job_start is not None:
            try:
                found.append(self.job_start.head.read_text(encoding="utf-8").strip())
            except OSError:
                pass
        if env.RENDEZVOUS in self.environ and self.environ[env.RENDEZVOUS] not in found:
            found.append(self.environ[env.RENDEZVOUS])
        return [where for where in found if where]

    def _enter(self, where: str, facts: Facts, patience: float) -> Joined:
        host, port = host_and_port(where)
        address = self._resolve(host, min(RESOLVE_WITHIN, patience / 2))
        sock = socket.create_connection((address, port), timeout=HANDSHAKE_WITHIN)
        try:
            told = self._shake_hands(sock, facts, patience)
        except BaseException:
            sock.close()
            raise
        return Joined({0: sock}, unpack(told["roster"]), told["addr"], sock.getpeername()[0])

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

    def _complain(self, error: LaunchError) -> None:
        """Tell the head by file what could not be told by wire, and give it time to end the run with a verdict: a
        agent that exits at once may have its whole step ended by the scheduler first."""
        if self.job_start is None or isinstance(error, Interrupted):
            return
        if not isinstance(error, Dismissed):
            message = {"host": self.place.host, "message": error.message, "hint": error.hint}
            try:
                self.job_start.path.mkdir(parents=True, exist_ok=True)
                write_atomically(self.job_start.path / f"trouble-{self.place.index}", json.dumps(message))
            except OSError as problem:
                print(
                    f"paceline: {self.job_start.path} cannot be written: {problem.strerror}", file=sys.stderr
                )
                return
        await_verdict(self.job_start, self.give_up)
