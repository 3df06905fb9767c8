"""The head while agents join: it lets in who knows the token, and knows who is missing."""

from __future__ import annotations

import ipaddress
import json
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping

from paceline.agent.placement import Absent, Interrupted, Place, host_of_node, job_start_folder
from paceline.agent.rendezvous.client import HANDSHAKE_WITHIN, WAITING, Facts, Joined, host_and_port, pack
from paceline.agent.rendezvous.network import LOOPBACK
from paceline.agent.rendezvous.transport import encode, prove, read_line, same
from paceline.contract import env
from paceline.contract.run_folder import write_atomically
from paceline.errors import LaunchError


class Host:
    """The head while it gathers the others."""

    def __init__(
        self, place: Place, environ: Mapping[str, str], *, token: str, give_up: Callable[[], bool]
    ) -> None:
        self.place = place
        self.environ = environ
        self.token = token
        self.give_up = give_up
        self.job_start = job_start_folder(environ)
        self.members: dict[int, socket.socket] = {}
        self.facts: dict[int, Facts] = {}

    def gather(self, facts: Facts, patience: float) -> Joined:
        self.facts[0] = facts
        _allow_descriptors(self.place.count + 256)
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
        told = encode({"kind": "roster", "roster": pack(roster), "addr": addr})
        for sock in self.members.values():
            try:
                sock.settimeout(HANDSHAKE_WITHIN)
                sock.sendall(told)
            except OSError:  # the link will find that it is lost
                continue
        return Joined(self.members, roster, addr, peer)

    def _listen(self) -> socket.socket:
        """On the port that was announced; if somebody took it since, another, written to the job start's folder."""
        announced = self.environ.get(env.RENDEZVOUS)
        host, port = host_and_port(announced) if announced else (self.place.host, 0)
        if self.job_start is None and not announced:
            raise LaunchError(f"neither {env.RENDEZVOUS} nor {env.JOB_START} is set: the agents cannot meet")
        try:
            listener = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            if self.job_start is None:
                raise LaunchError(f"port {port} on {self.place.host} is taken: {error.strerror}") from None
            listener = socket.create_server(("", 0), backlog=1024)
        if self.job_start is not None:
            self.job_start.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.job_start.head, f"{host}:{listener.getsockname()[1]}\n")
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
                why = f"it is number {index} of {answer['count']}, but the head expects {self.place.count} agents"
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
        """A member that cannot get here says so in the job start's folder, so that the head need not wait for it."""
        if self.job_start is None:
            return
        for path in sorted(self.job_start.path.glob("trouble-*")):
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
                words.append(f"node {host or node} (agent {index + 1} of {count})")
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


def _allow_descriptors(count: int) -> None:
    """One socket per agent: the usual soft limit of 1,024 is not enough for a large run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
