"""The server side of the rendezvous: the head agent accepts the others and knows who is missing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping

from paceline.agent.launcher_placement import Placement, node_name
from paceline.agent.rendezvous.admission import Admission, Candidate
from paceline.agent.rendezvous.client import (
    HANDSHAKE_TIMEOUT,
    INTERRUPTED,
    Facts,
    Membership,
    encode_roster,
    split_address,
)
from paceline.agent.rendezvous.errors import AgentsMissing, Interrupted
from paceline.agent.rendezvous.job_start import job_start_folder
from paceline.agent.rendezvous.master_address import choose_addresses
from paceline.agent.rendezvous.network import bind_port, join_address
from paceline.agent.rendezvous.transport import encode
from paceline.agent.workers.process_tree import raise_descriptor_limit
from paceline.contract import env
from paceline.contract.run_folder import write_atomically
from paceline.errors import LaunchError

MAX_CONNECTIONS = 1024  # that are not agents yet
SPARE_DESCRIPTORS = 256


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
        self.placement = placement
        self.environ = environ
        self.token = token
        self.interrupted = interrupted
        self.job_start = job_start_folder(environ)
        self.members: dict[int, socket.socket] = {}
        self.facts: dict[int, Facts] = {}
        self.max_connections = MAX_CONNECTIONS

    def accept_all(self, facts: Facts, timeout: float) -> Membership:
        """Wait until all agents have joined, then send everyone the roster."""
        self.facts[0] = facts
        allowed = raise_descriptor_limit(self.placement.count + SPARE_DESCRIPTORS + MAX_CONNECTIONS)
        self.max_connections = max(
            16, min(MAX_CONNECTIONS, allowed - self.placement.count - SPARE_DESCRIPTORS)
        )
        deadline = time.monotonic() + timeout
        try:
            with self._listen() as listener, self._admission(listener) as admission:
                while len(self.facts) < self.placement.count:
                    if self.interrupted():
                        raise Interrupted(INTERRUPTED)
                    self._raise_reported_error()
                    if time.monotonic() > deadline:
                        raise self._missing(timeout)
                    for candidate in admission.poll(0.5):
                        self._admit(candidate)
        except BaseException as error:
            self._reject_all(str(error))
            raise
        roster = [self.facts[index] for index in range(self.placement.count)]
        head_address, peer_address = choose_addresses(self.members)
        line = encode(
            {"kind": "roster", "roster": encode_roster(roster), "head_address": head_address}
        )
        for sock in self.members.values():
            try:
                sock.settimeout(HANDSHAKE_TIMEOUT)
                sock.sendall(line)
            except OSError:  # the transport will find that it is lost
                continue
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

    def _admission(self, listener: socket.socket) -> Admission:
        return Admission(
            listener,
            token=self.token,
            handshake_timeout=HANDSHAKE_TIMEOUT,
            max_connections=self.max_connections,
        )

    def _admit(self, candidate: Candidate) -> None:
        """Make an agent that knows the token a member, unless it is not one of this run's."""
        sock, index, facts = candidate.sock, candidate.index, candidate.hello.get("facts")
        count, theirs = self.placement.count, candidate.hello.get("count")
        if not 0 < index < count or theirs != count or not isinstance(facts, dict):
            reason = f"It has index {index} of {theirs}, but the head agent expects {count} agents."
            _reject(sock, reason)
            return
        if index in self.members:  # it lost its first connection and joins again
            self.members[index].close()
        self.members[index] = sock
        self.facts[index] = facts

    def _raise_reported_error(self) -> None:
        """Raise the error of an agent that cannot get here, instead of waiting for it."""
        if self.job_start is None:
            return
        for path in self.job_start.join_errors():
            try:
                report = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            raise AgentsMissing(report["message"], hint=report["hint"], hosts=[report["host"]])

    def _missing(self, timeout: float) -> AgentsMissing:
        count, nodes = self.placement.count, self.placement.nodes
        names, hosts = [], []
        for index in range(1, count):
            if index not in self.facts:
                node = index * nodes // count
                host = node_name(node, self.environ)
                hosts += [host] if host and host not in hosts else []
                names.append(f"node {host or node} (agent {index + 1} of {count})")
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return AgentsMissing(
            f"Agents did not join within {timeout:g} s: {listed}.",
            hint="A node did not start, or cannot reach the head node. Read its lines in the "
            "job's log.",
            hosts=hosts,
        )

    def _reject_all(self, reason: str) -> None:
        for sock in self.members.values():
            _reject(sock, reason)


def _reject(sock: socket.socket, reason: str) -> None:
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT)
        sock.sendall(encode({"kind": "rejected", "reason": reason}))
    except OSError:
        pass
    sock.close()
