"""The client side of the rendezvous: an agent that joins the head agent."""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from paceline.agent.launcher_placement import Placement
from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.handshake import SIZE_DIGITS, STRANGER, greet_head, read_exactly
from paceline.agent.rendezvous.membership import (
    HANDSHAKE_TIMEOUT,
    INTERRUPTED,
    Facts,
    Interrupted,
    JoinRejected,
    Membership,
    await_verdict,
    decode_roster,
    job_start_folder,
    split_address,
)
from paceline.agent.rendezvous.transport import encode
from paceline.contract import env
from paceline.contract.run_folder import write_atomically
from paceline.errors import LaunchError

# seconds; name services hiccup, but a node that needs longer cannot see the head node
RESOLVE_TIMEOUT = 10.0
REPORT_AFTER = 5.0  # seconds; until then the head agent may still be starting
# Seconds without an answer of the head node's kernel until the head agent counts as lost.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class RendezvousClient:
    """Joins this agent to the head agent."""

    def __init__(
        self,
        placement: Placement,
        environ: Mapping[str, str],
        *,
        token: str,
        interrupted: Callable[[], bool],
        report: Callable[..., None] = lambda **_: None,
    ) -> None:
        """`report` gets what stands between this agent and the head agent, once that takes long."""
        self.placement = placement
        self.environ = environ
        self.token = token
        self.interrupted = interrupted
        self.report = report
        self.job_start = job_start_folder(environ)
        self.name = f"Agent {placement.index + 1} of {placement.count} on node {placement.host}"
        self.unresolved_since: float | None = None

    def join(self, facts: Facts, timeout: float) -> Membership:
        """Join the head agent, or leave an error where the head agent reads it."""
        try:
            return self._retry(facts, timeout)
        except LaunchError as error:
            self._report(error)
            raise

    def _retry(self, facts: Facts, timeout: float) -> Membership:
        """Try the announced address, and the one in the job start's folder, until the head agent
        accepts.
        """
        began = time.monotonic()
        deadline = began + timeout
        problem, address, reported = "its address is unknown", "?", False
        while time.monotonic() < deadline:
            if self.interrupted():
                raise Interrupted(INTERRUPTED)
            for address in self._addresses():
                try:
                    return self._connect(address, facts, timeout)
                except (OSError, ValueError, KeyError) as error:
                    problem = str(error).rstrip(".")
            if not reported and time.monotonic() - began > REPORT_AFTER:
                reported = True
                self._report_reach(address, problem)
            time.sleep(0.2)
        raise LaunchError(
            f"{self.name} could not join the head agent at {address} within {timeout:g} s: "
            f"{problem}.",
            hint="Check that this node can reach that address, and that the head agent is running.",
        )

    def _addresses(self) -> list[str]:
        found = []
        if self.job_start is not None:
            try:
                found.append(self.job_start.head.read_text(encoding="utf-8").strip())
            except OSError:
                pass
        if env.RENDEZVOUS in self.environ and self.environ[env.RENDEZVOUS] not in found:
            found.append(self.environ[env.RENDEZVOUS])
        return [address for address in found if address]

    def _connect(self, head: str, facts: Facts, timeout: float) -> Membership:
        host, port = split_address(head)
        sock = self._reach(self._resolve(host, min(RESOLVE_TIMEOUT, timeout / 2)), port)
        try:
            message = self._handshake(sock, facts)
        except BaseException:
            sock.close()
            raise
        roster = decode_roster(message["roster"])
        peer = network.plain_address(sock.getpeername()[0])
        return Membership({0: sock}, roster, message["head_address"], peer)

    @staticmethod
    def _reach(addresses: list[str], port: int) -> socket.socket:
        """Connect to the first of these addresses that answers."""
        for address in addresses[:-1]:
            with suppress(OSError):
                return socket.create_connection((address, port), timeout=HANDSHAKE_TIMEOUT)
        return socket.create_connection((addresses[-1], port), timeout=HANDSHAKE_TIMEOUT)

    def _resolve(self, host: str, timeout: float) -> list[str]:
        try:
            addresses = network.resolve(host, agent=self.name)
        except LaunchError as error:
            self.unresolved_since = self.unresolved_since or time.monotonic()
            if time.monotonic() - self.unresolved_since > timeout:
                raise
            raise OSError(error.message) from None
        self.unresolved_since = None
        return addresses

    def _handshake(self, sock: socket.socket, facts: Facts) -> dict[str, Any]:
        index, count = self.placement.index, self.placement.count
        greet_head(
            sock, token=self.token, index=index, deadline=time.monotonic() + HANDSHAKE_TIMEOUT
        )
        sock.settimeout(HANDSHAKE_TIMEOUT)
        sock.sendall(encode({"count": count, "facts": facts}))
        # From here on the head agent counts the time: it knows who is missing. This connection
        # ends with it, or with its node.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        while not select.select([sock], [], [], 0.5)[0]:
            if self.interrupted():
                raise Interrupted(INTERRUPTED)
        message = read_answer(sock, time.monotonic() + HANDSHAKE_TIMEOUT)
        if message.get("kind") == "rejected":
            raise JoinRejected(str(message["reason"]))
        return message

    def _report_reach(self, address: str, problem: str) -> None:
        with suppress(LaunchError):
            self.report(
                address=address, error=problem, **network.describe_reach(split_address(address)[0])
            )

    def _report(self, error: LaunchError) -> None:
        """Leave the error in a file for the head agent, and give it time to write the verdict.

        If this agent exits at once, the scheduler may end the whole step first.
        """
        if self.job_start is None or isinstance(error, Interrupted):
            return
        if not isinstance(error, JoinRejected):
            message = {"host": self.placement.host, "message": error.message, "hint": error.hint}
            try:
                self.job_start.path.mkdir(parents=True, exist_ok=True)
                write_atomically(
                    self.job_start.join_error(self.placement.index), json.dumps(message)
                )
            except OSError as problem:
                print(
                    f"paceline: cannot write {self.job_start.path}: {problem.strerror}",
                    file=sys.stderr,
                )
                return
        await_verdict(self.job_start, self.interrupted)


def read_answer(sock: socket.socket, deadline: float) -> dict[str, Any]:
    """Read the head agent's answer, and not a byte more: what follows is the transport's."""
    size = read_exactly(sock, SIZE_DIGITS, deadline)
    if not size.isdigit():
        raise ConnectionError(STRANGER)
    message: dict[str, Any] = json.loads(read_exactly(sock, int(size), deadline))
    return message
