"""The agents of a run meet: who is here, where the ranks of the next attempt meet, and who was lost."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.agent.placement import Absent, Interrupted, Place, await_verdict, job_start_folder
from paceline.agent.rendezvous.network import LOOPBACK
from paceline.contract import env
from paceline.errors import LaunchError

if TYPE_CHECKING:  # a agent that is alone needs neither, and is to start fast
    from paceline.agent.rendezvous.transport import Link

__all__ = ["Absent", "Facts", "Interrupted", "Master", "Meeting", "await_verdict", "job_start_folder", "join"]

Facts = dict[str, Any]
Message = dict[str, Any]

SILENCE = 12.0  # seconds without a word before another agent counts as lost
PATIENCE = 120.0  # seconds within which all agents must have joined
SLOWEST_IMPORT = (
    900.0  # seconds that a node may take to import torch from a slow file system; a lost one is told sooner
)


@dataclass(frozen=True)
class Master:
    """Where the ranks of an attempt meet: MASTER_ADDR and MASTER_PORT."""

    addr: str
    port: int


class Meeting:
    """All agents of a run, joined. With one agent there is nobody to talk to, and no socket."""

    def __init__(
        self,
        place: Place,
        roster: list[Facts],
        *,
        link: Link | None = None,
        addr: str = LOOPBACK,
        peer: str = LOOPBACK,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.place = place
        self.roster = roster
        self.addr = addr  # of the head, as the members reach it
        self.peer = peer  # an address on another node: the way there is the interface to train over
        self._link = link
        self._give_up = give_up
        self._arrived: list[Message] = []  # for the agent
        self._preparing: list[Message] = []  # for `prepare`; another agent may be there first
        self._reserved: socket.socket | None = None

    def name_of(self, index: int) -> str:
        """A agent in words, for people."""
        host = self.roster[index].get("host", "?") if index < len(self.roster) else "?"
        return f"node {host} (agent {index + 1} of {self.place.count})"

    def prepare(self, attempt: int, *, within: float = SLOWEST_IMPORT) -> Master:
        """Collective: when all agents are ready for an attempt, the head says where its ranks meet."""
        if self._link is None:
            return Master(self.addr, self._reserve())
        if not self.place.is_head:
            self._link.say({"kind": "ready", "attempt": attempt}, to=0)
            told = self._await("prepared", attempt, {0}, within)[0]
            return Master(told["addr"], told["port"])
        self._await("ready", attempt, set(range(1, self.place.count)), within)
        master = Master(self.addr, self._reserve())
        self._link.say({"kind": "prepared", "attempt": attempt, "addr": master.addr, "port": master.port})
        return master

    def say(self, message: Message, *, to: int | None = None) -> None:
        """To all others, or to one agent (0 is the head). Arrives with "from"."""
        if self._link is not None:
            self._link.say(message, to=to)

    def poll(self) -> list[Message]:
        """What has arrived: the others' messages, {"kind": "left", "from": i}, {"kind": "lost", "index": i, "why"}."""
        if self._link is not None:
            self._sort(self._link.poll())
        arrived, self._arrived = self._arrived, []
        return arrived

    def put_back(self, messages: list[Message]) -> None:
        """What was polled and is meant for somebody else: the next `poll` brings it again, ahead of what is new."""
        self._arrived[:0] = messages

    @property
    def present(self) -> set[int]:
        """The other agents that are still there (for a member: the head)."""
        return set() if self._link is None else set(self._link.present)

    def fileno(self) -> int | None:
        """Readable when `poll` has something new."""
        return None if self._link is None else self._link.fileno()

    def close(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _reserve(self) -> int:
        """A free port, held until the next attempt: bound and never listened on, so that nobody else is given it
        while a rank that binds it with SO_REUSEADDR, as torch's store does, can listen on it."""
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        port: int = self._reserved.getsockname()[1]
        return port

    def _sort(self, messages: list[Message]) -> None:
        for message in messages:
            own = message.get("kind") in ("ready", "prepared")
            (self._preparing if own else self._arrived).append(message)

    def _await(self, kind: str, attempt: int, whom: set[int], within: float) -> dict[int, Message]:
        """One message of a kind from each of some agents, or an error that names who is gone or late."""
        assert self._link is not None
        deadline = time.monotonic() + within
        while True:
            present = self._link.present  # looked up before the inbox: what one said before it went is heard
            self._sort(self._link.poll())
            got = {
                message["from"]: message
                for message in self._preparing
                if message["kind"] == kind and message["attempt"] == attempt
            }
            if whom <= set(got):
                self._preparing = [message for message in self._preparing if message["attempt"] > attempt]
                return got
            gone = whom - set(got) - present
            if not self.place.is_head:
                # Another member's loss ends the head's wait too, and so this one.
                gone |= {message["index"] for message in self._arrived if message.get("kind") == "lost"}
            if gone:
                raise self._absent(gone, f"was lost before attempt {attempt} began")
            if self._give_up():
                raise Interrupted(f"interrupted while preparing attempt {attempt}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._absent(
                    whom - set(got), f"was not ready for attempt {attempt} within {within:g} s"
                )
            self._sort(self._link.wait(min(left, 1.0)))

    def _absent(self, indices: set[int], what: str) -> Absent:
        names = ", ".join(self.name_of(index) for index in sorted(indices))
        return Absent(f"{names} {what}", hosts=sorted({self.roster[index]["host"] for index in indices}))


def join(
    place: Place,
    environ: Mapping[str, str],
    facts: Facts,
    *,
    patience: float = PATIENCE,
    silence: float = SILENCE,
    give_up: Callable[[], bool] = lambda: False,
) -> Meeting:
    """Meet the other agents, in whatever order they start, or say who never came (`Absent`, on the head).

    `give_up` is asked again and again while this waits, here and in `prepare`: true ends it (`Interrupted`).
    """
    if place.count == 1:
        return Meeting(place, [facts])
    from paceline.agent.rendezvous.client import Visitor
    from paceline.agent.rendezvous.server import Host
    from paceline.agent.rendezvous.transport import Link

    token = environ.get(env.TOKEN, "")
    if not token:
        raise LaunchError(
            f"{place.count} agents are to meet, but {env.TOKEN} is not set",
            hint="whoever starts the agents gives all of them the same secret",
        )
    bell = os.pipe()  # made ahead of the sockets: `select` takes no descriptor beyond 1023
    try:
        if place.is_head:
            joined = Host(place, environ, token=token, give_up=give_up).gather(facts, patience)
        else:
            joined = Visitor(place, environ, token=token, give_up=give_up).visit(facts, patience)
    except BaseException:
        os.close(bell[0])
        os.close(bell[1])
        raise
    link = Link(place.index, joined.sockets, silence=silence, bell=bell)
    return Meeting(place, joined.roster, link=link, addr=joined.addr, peer=joined.peer, give_up=give_up)
