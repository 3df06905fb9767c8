"""The connected agents of a run: who is here, where the ranks of the next attempt connect, and who
was lost.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.agent.launcher_placement import Placement
from paceline.agent.rendezvous.membership import AgentsLost, AgentsMissing, Interrupted
from paceline.agent.rendezvous.network import bind_port, loopback
from paceline.contract import env
from paceline.errors import LaunchError

if TYPE_CHECKING:  # a single agent does not need it and should start fast
    from paceline.agent.rendezvous.transport import Transport

Message = dict[str, Any]
Facts = dict[str, Any]

SILENCE_TIMEOUT = 12.0  # seconds without a message before another agent counts as lost
# Seconds within which the next agent must join, whatever their number, and per agent: a scheduler
# starts many nodes one after the other, and their file system is busy.
JOIN_TIMEOUT, JOIN_TIMEOUT_PER_AGENT = 120.0, 0.5
# Seconds that a node may take to import torch from a slow file system. A lost node is noticed
# sooner.
PREPARE_TIMEOUT = 900.0


@dataclass(frozen=True)
class Master:
    """Where the ranks of an attempt connect: MASTER_ADDR and MASTER_PORT."""

    address: str
    port: int


class Rendezvous:
    """All agents of a run, connected. A single agent has no peers and opens no socket."""

    def __init__(
        self,
        placement: Placement,
        roster: list[Facts],
        *,
        transport: Transport | None = None,
        head_address: str = "",
        peer_address: str = "",
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.placement = placement
        self.roster = roster
        self.head_address = head_address or loopback()  # as the members reach it
        self.peer_address = (
            peer_address or self.head_address
        )  # on another node: the route there is the interface to train over
        self._transport = transport
        self._interrupted = interrupted
        self._arrived: list[Message] = []  # for `poll`
        self._preparing: list[Message] = []  # for `prepare`; another agent may get there first
        self._reserved: socket.socket | None = None

    def describe(self, index: int) -> str:
        """Return the name of an agent for messages to people."""
        host = self.roster[index].get("host", "?") if index < len(self.roster) else "?"
        return f"node {host} (agent {index + 1} of {self.placement.count})"

    def prepare(self, attempt: int, *, timeout: float = PREPARE_TIMEOUT) -> Master:
        """Wait until all agents are ready for an attempt, and return where its ranks connect.
        Collective.
        """
        if self._transport is None:
            return Master(self.head_address, self._reserve_port())
        if not self.placement.is_head:
            self._transport.send({"kind": "ready", "attempt": attempt}, to=0)
            message = self._await("prepared", attempt, {0}, timeout)[0]
            return Master(message["address"], message["port"])
        self._await("ready", attempt, set(range(1, self.placement.count)), timeout)
        master = Master(self.head_address, self._reserve_port())
        self._transport.send(
            {"kind": "prepared", "attempt": attempt, "address": master.address, "port": master.port}
        )
        return master

    def _reserve_port(self) -> int:
        """Reserve a free port until the next attempt.

        It is bound but never listened on: no other process gets it, while a rank that binds it with
        SO_REUSEADDR, as torch's store does, can listen on it.
        """
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = bind_port(0)
        port: int = self._reserved.getsockname()[1]
        return port

    def send(self, message: Message, *, to: int | None = None) -> None:
        """Send to all agents that this one is connected to, or to one: members are connected to
        the head agent alone. It arrives with the key "from".
        """
        if self._transport is not None:
            self._transport.send(message, to=to)

    def poll(self) -> list[Message]:
        """Return what has arrived.

        Beside messages of other agents: {"kind": "left", "from": i}, and {"kind": "lost", "index":
        i, "reason": text, "closed": flag}.
        """
        if self._transport is not None:
            self._route(self._transport.poll())
        arrived, self._arrived = self._arrived, []
        return arrived

    def put_back(self, messages: list[Message]) -> None:
        """Return messages that are meant for another caller: the next `poll` brings them first."""
        self._arrived[:0] = messages

    def gather(
        self, kind: str, senders: set[int], *, timeout: float, ended: Callable[[], bool]
    ) -> dict[int, Message]:
        """Return one message of this kind from each sender that sends one in time. Others stay for
        `poll`.
        """
        found: dict[int, Message] = {}
        deadline = time.monotonic() + timeout
        while True:
            present = self.present
            messages = self.poll()
            found |= {each["from"]: each for each in messages if each.get("kind") == kind}
            self.put_back([each for each in messages if each.get("kind") != kind])
            missing = senders - set(found)
            if not missing & present or time.monotonic() > deadline or ended():
                return found
            time.sleep(0.05)

    @property
    def present(self) -> set[int]:
        """The other agents that are still connected (for a member: the head agent)."""
        return set() if self._transport is None else set(self._transport.present)

    def was_killed(self, index: int, *, closed: bool) -> bool:
        """Whether a lost agent was killed, rather than its node lost. `closed`: its connection was
        closed.
        """
        return closed and self._transport is not None and self._transport.responds(index)

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when `poll` has something new."""
        return None if self._transport is None else self._transport.fileno()

    def close(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _route(self, messages: list[Message]) -> None:
        for message in messages:
            own = message.get("kind") in ("ready", "prepared")
            (self._preparing if own else self._arrived).append(message)

    def _await(
        self, kind: str, attempt: int, senders: set[int], timeout: float
    ) -> dict[int, Message]:
        """Return one message of this kind from each sender, or raise an error that names who is
        gone or late.
        """
        assert self._transport is not None
        deadline = time.monotonic() + timeout
        while True:
            present = self.present  # a copy from before the inbox: a last message still counts
            self._route(self._transport.poll())
            found = {
                message["from"]: message
                for message in self._preparing
                if message["kind"] == kind and message["attempt"] == attempt
            }
            if senders <= set(found):
                # What is left is of earlier attempts, such as ranks that took too long to end.
                self._preparing.clear()
                self._arrived = [each for each in self._arrived if each.get("kind") != "exits"]
                return found
            gone = senders - set(found) - present
            if not self.placement.is_head:
                # The loss of another member ends the head agent's wait, and so this one.
                gone |= {
                    message["index"] for message in self._arrived if message.get("kind") == "lost"
                }
            if gone:
                raise self._missing(gone, f"Lost before attempt {attempt} began", AgentsLost)
            if self._interrupted():
                raise Interrupted(f"Interrupted while preparing attempt {attempt}.")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._missing(
                    senders - set(found), f"Not ready for attempt {attempt} within {timeout:g} s"
                )
            self._route(self._transport.wait(min(left, 1.0)))

    def _missing(
        self, indices: set[int], what: str, kind: type[AgentsMissing] = AgentsMissing
    ) -> AgentsMissing:
        names = ", ".join(self.describe(index) for index in sorted(indices))
        closed = {
            message["index"]
            for message in self._arrived
            if message.get("kind") == "lost" and message["closed"]
        }
        killed = all(self.was_killed(index, closed=index in closed) for index in indices)
        hosts = list(dict.fromkeys(self.roster[index]["host"] for index in sorted(indices)))
        return kind(f"{what}: {names}.", hosts=hosts, killed=killed)


def join(
    placement: Placement,
    environ: Mapping[str, str],
    facts: Facts,
    *,
    timeout: float = 0.0,
    silence_timeout: float = SILENCE_TIMEOUT,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[..., None] = lambda **_: None,
) -> Rendezvous:
    """Join the other agents, in whatever order they start. On the head agent, `AgentsMissing` names
    who never came within the time-out (0: one that grows with the number of agents).

    While this waits, here and in `prepare`, it keeps calling `interrupted`: true raises
    `Interrupted`. A member that cannot reach the head agent calls `report` with what it knows about
    the way there.
    """
    if placement.count == 1:
        return Rendezvous(placement, [facts])
    from paceline.agent.rendezvous.server_and_client import RendezvousClient, RendezvousServer

    token = environ.get(env.TOKEN, "")
    if not token:
        raise LaunchError(
            f"{placement.count} agents need a shared secret, but {env.TOKEN} is not set.",
            hint="Give all agents of the run the same value.",
        )
    timeout = timeout or JOIN_TIMEOUT + JOIN_TIMEOUT_PER_AGENT * placement.count
    common: dict[str, Any] = {
        "token": token,
        "silence_timeout": silence_timeout,
        "interrupted": interrupted,
    }
    if placement.is_head:
        joined = RendezvousServer(placement, environ, **common).accept_all(facts, timeout)
    else:
        client = RendezvousClient(placement, environ, report=report, **common)
        joined = client.join(facts, timeout)
    rendezvous = Rendezvous(
        placement,
        joined.roster,
        transport=joined.transport,
        head_address=joined.head_address,
        peer_address=joined.peer_address,
        interrupted=interrupted,
    )
    rendezvous._route(joined.unread)
    return rendezvous
