"""Where the ranks of an attempt connect: the head agent's address, and a port that is free and
stays so.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.agent.rendezvous.network import bind_port, loopback, plain_address


@dataclass(frozen=True)
class Master:
    """Where the ranks of an attempt connect: MASTER_ADDR and MASTER_PORT."""

    address: str
    port: int


class ReservedPort:
    """The port of an attempt, reserved on the head agent."""

    def __init__(self) -> None:
        self._reserved: socket.socket | None = None

    def reserve(self) -> int:
        """Reserve a free port until the next attempt.

        It is bound but never listened on: no other process gets it, while a rank that binds it with
        SO_REUSEADDR, as torch's store does, can listen on it.
        """
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = bind_port(0)
        port: int = self._reserved.getsockname()[1]
        return port

    def close(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


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
