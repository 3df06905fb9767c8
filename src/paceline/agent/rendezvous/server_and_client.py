"""Joining the run: the head agent waits for all others, and each of them finds the head agent."""

from __future__ import annotations

import base64
import json
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.agent.launcher_placement import Placement, node_name
from paceline.agent.rendezvous import network
from paceline.agent.rendezvous.handshake import HANDSHAKE_TIMEOUT, greet_head
from paceline.agent.rendezvous.membership import AgentsMissing, Interrupted, await_verdict
from paceline.agent.rendezvous.transport import MAX_STRANGERS, Message, Transport
from paceline.agent.workers.process_tree import raise_descriptor_limit
from paceline.contract import env
from paceline.contract.run_folder import JobStartFolder, RunFolder, write_atomically
from paceline.errors import LaunchError

SPARE_DESCRIPTORS = 256
LOOK_INTERVAL = 0.5  # seconds between two looks for agents that report an error
MAX_NAMES = 8  # agents that a message names
# seconds; name services hiccup, but a node that needs longer cannot see the head node
RESOLVE_TIMEOUT = 10.0
REPORT_AFTER = 5.0  # seconds; until then the head agent may still be starting
INTERRUPTED = "Interrupted while waiting for the other agents."


class JoinRejected(LaunchError):
    """The head agent turned this agent away, so it knows about the error already."""


@dataclass(frozen=True)
class Joined:
    """The result of joining: the connections, and who is here."""

    transport: Transport
    roster: list[Message]
    head_address: str  # as the members reach it
    peer_address: str  # on another node
    unread: list[Message]  # what has arrived since, or who was lost meanwhile


def split_address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    return host.strip("[]"), int(port)


def _job_start_folder(environ: Mapping[str, str]) -> JobStartFolder:
    """Return the folder that all agents of this job start share."""
    return RunFolder(Path(environ[env.RUN])).job_start(environ[env.JOB_START])


# -- the head agent
# --------------------------------------------------------------------------------------


class RendezvousServer:
    """Accepts all other agents of the run."""

    def __init__(
        self,
        placement: Placement,
        environ: Mapping[str, str],
        *,
        token: str,
        silence_timeout: float,
        interrupted: Callable[[], bool],
    ) -> None:
        self.placement, self.environ = placement, environ
        self.interrupted = interrupted
        self.job_start = _job_start_folder(environ)
        self.facts: dict[int, Message] = {}
        self.lost: dict[int, Message] = {}
        needed = placement.count + SPARE_DESCRIPTORS
        allowed = raise_descriptor_limit(needed + MAX_STRANGERS)
        self.transport = Transport(
            {},
            is_head=True,
            silence_timeout=silence_timeout,
            listener=self._listen(),
            token=token,
            max_strangers=max(16, min(MAX_STRANGERS, allowed - needed)),
        )

    def accept_all(self, facts: Message, timeout: float) -> Joined:
        """Wait until all agents have joined, then send everyone the roster.

        As long as agents arrive, more may come: the time-out counts from the last one.
        """
        self.facts[0] = facts
        deadline, arrived, next_look = time.monotonic() + timeout, 1, 0.0
        try:
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
                for message in self.transport.wait(LOOK_INTERVAL):
                    self._handle(message)
        except BaseException as error:
            self.transport.send({"kind": "rejected", "reason": str(error)})
            self.transport.close()
            raise
        self.transport.stop_listening()
        roster = [self.facts[index] for index in range(self.placement.count)]
        head_address, peer_address = choose_addresses(self.transport)
        # Thousands of similar nodes make a small message.
        packed = base64.b64encode(zlib.compress(json.dumps(roster).encode(), 6)).decode()
        self.transport.send({"kind": "roster", "roster": packed, "head_address": head_address})
        return Joined(self.transport, roster, head_address, peer_address, list(self.lost.values()))

    def _listen(self) -> socket.socket:
        """Listen on the announced port, or on another if that is taken; write which one to the job
        start's folder.
        """
        announced = self.environ.get(env.RENDEZVOUS)
        host, port = split_address(announced) if announced else (self.placement.host, 0)
        try:
            listener = network.bind_port(port, backlog=1024)
        except OSError:
            listener = network.bind_port(0, backlog=1024)
        self.job_start.path.mkdir(parents=True, exist_ok=True)
        address = network.join_address(host, listener.getsockname()[1])
        write_atomically(self.job_start.head, f"{address}\n")
        return listener

    def _handle(self, message: Message) -> None:
        """Take note of an agent that has joined, or is gone again."""
        index = message["from"]
        if message.get("kind") in ("lost", "left"):
            self.lost[index] = {"closed": True, **message, "kind": "lost", "index": index}
        elif message.get("kind") == "hello" and 0 < index < self.placement.count:
            self.facts[index] = message["facts"]
            self.lost.pop(index, None)  # it joins again

    def _raise_reported_error(self) -> None:
        """Raise the error of an agent that cannot get here, instead of waiting for it."""
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


def choose_addresses(transport: Transport) -> tuple[str, str]:
    """Return the head agent's address as most members reach it, and the address of a member on
    another node.
    """
    import ipaddress  # a single agent does without

    remote = []
    for own, (peer, _) in transport.addresses.values():
        # A host that resolves its own name to 127.0.1.1 must not announce that address to the
        # others.
        if own and own != peer and not ipaddress.ip_address(own).is_loopback:
            remote.append((own, peer))
    if not remote:
        return network.loopback(), network.loopback()
    address = Counter(own for own, _ in remote).most_common(1)[0][0]
    return address, next(peer for own, peer in remote if own == address)


# -- the other agents
# ------------------------------------------------------------------------------------


class RendezvousClient:
    """Joins this agent to the head agent."""

    def __init__(
        self,
        placement: Placement,
        environ: Mapping[str, str],
        *,
        token: str,
        silence_timeout: float,
        interrupted: Callable[[], bool],
        report: Callable[..., None] = lambda **_: None,
    ) -> None:
        """`report` gets what stands between this agent and the head agent, once that takes long."""
        self.placement, self.environ = placement, environ
        self.token, self.silence_timeout = token, silence_timeout
        self.interrupted, self.report = interrupted, report
        self.job_start = _job_start_folder(environ)
        self.name = f"Agent {placement.index + 1} of {placement.count} on node {placement.host}"
        self.unresolved_since: float | None = None

    def join(self, facts: Message, timeout: float) -> Joined:
        """Join the head agent, or leave an error where the head agent reads it."""
        try:
            return self._retry(facts, timeout)
        except LaunchError as error:
            self._report(error)
            raise

    def _retry(self, facts: Message, timeout: float) -> Joined:
        """Try the announced address, and the one in the job start's folder, until the head agent
        accepts.
        """
        began = time.monotonic()
        problem, address, reported = "its address is unknown", "", False
        while time.monotonic() < began + timeout:
            if self.interrupted():
                raise Interrupted(INTERRUPTED)
            for address in self._addresses():
                host, port = split_address(address)
                try:
                    addresses = self._resolve(host, min(RESOLVE_TIMEOUT, timeout / 2))
                    return self._wait_for_roster(self._connect(addresses, port), facts)
                except OSError as error:
                    problem = str(error).rstrip(".")
            if address and not reported and time.monotonic() - began > REPORT_AFTER:
                reported = True
                reach = network.describe_reach(split_address(address)[0])
                self.report(address=address, error=problem, **reach)
            time.sleep(0.2)
        where = f" at {address}" if address else ""
        raise LaunchError(
            f"{self.name} could not join the head agent{where} within {timeout:g} s: {problem}.",
            hint="Check that this node can reach that address, and that the head agent is running.",
        )

    def _addresses(self) -> list[str]:
        found = [self.environ.get(env.RENDEZVOUS, "")]
        with suppress(OSError):
            found.insert(0, self.job_start.head.read_text(encoding="utf-8").strip())
        return [address for address in dict.fromkeys(found) if address]

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

    def _connect(self, addresses: list[str], port: int) -> socket.socket:
        """Connect to the first of these addresses that answers, if it is the head agent's."""
        problem = OSError("it has no address")
        for address in addresses:
            try:
                sock = socket.create_connection((address, port), timeout=HANDSHAKE_TIMEOUT)
            except OSError as error:
                problem = error
                continue
            try:
                deadline = time.monotonic() + HANDSHAKE_TIMEOUT
                greet_head(sock, token=self.token, index=self.placement.index, deadline=deadline)
            except BaseException:
                sock.close()
                raise
            return sock
        raise problem

    def _wait_for_roster(self, sock: socket.socket, facts: Message) -> Joined:
        """Wait for the others. From here on the head agent counts the time: it knows who is
        missing.
        """
        transport = Transport({0: sock}, is_head=False, silence_timeout=self.silence_timeout)
        try:
            transport.send({"kind": "hello", "facts": facts})
            while True:
                if self.interrupted():
                    raise Interrupted(INTERRUPTED)
                messages = transport.wait(0.5)
                for number, message in enumerate(messages):
                    kind, index = message.get("kind"), message.get("index", 0)
                    if kind == "roster":
                        packed = zlib.decompress(base64.b64decode(message["roster"]))
                        return Joined(
                            transport,
                            json.loads(packed),
                            message["head_address"],
                            transport.addresses[0][1][0],
                            messages[number + 1 :],
                        )
                    if kind == "rejected":
                        raise JoinRejected(message["reason"])
                    if kind == "left" or (kind == "lost" and index == 0):
                        raise ConnectionError(message.get("reason", "the head agent has ended"))
        except BaseException:
            transport.close()
            raise

    def _report(self, error: LaunchError) -> None:
        """Leave the error in a file for the head agent, and give it time to write the verdict.

        If this agent exits at once, the scheduler may end the whole step first.
        """
        if isinstance(error, Interrupted):
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
