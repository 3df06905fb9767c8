"""What both sides of the rendezvous share: the result, the errors, and the job start's folder."""

from __future__ import annotations

import base64
import json
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import env
from paceline.contract.run_folder import JobStartFolder, RunFolder
from paceline.errors import LaunchError

Facts = dict[str, Any]

HANDSHAKE_TIMEOUT = 5.0  # seconds for one connection
# seconds that an agent with an error waits for the head agent to end the run
VERDICT_TIMEOUT = 15.0
INTERRUPTED = "Interrupted while waiting for the other agents."


class AgentsMissing(LaunchError):
    """Some agents did not join; `hosts` are their nodes, as far as they are known.

    `killed`: they were killed, and their nodes are up.
    """

    def __init__(
        self, message: str, *, hint: str = "", hosts: list[str] | None = None, killed: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.hosts, self.killed = hosts or [], killed


class AgentsLost(AgentsMissing):
    """Agents that had joined are gone."""


class Interrupted(LaunchError):
    """The user ended the run before its ranks started."""


class JoinRejected(LaunchError):
    """The head agent turned this agent away, so it knows about the error already."""


@dataclass(frozen=True)
class Membership:
    """The result of joining: sockets (the head agent's to all, a member's to the head agent) and
    who is here.
    """

    sockets: dict[int, socket.socket]
    roster: list[Facts]
    head_address: str  # as the members reach it
    peer_address: str  # on another node


def split_address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(
            f'Invalid address of the head agent "{text}": use "host:port".',
            hint=f"Paceline sets it in {env.RENDEZVOUS}: check whether your shell or a `setup` "
            "line does, too.",
        )
    return host.strip("[]"), int(port)


def encode_roster(roster: list[Facts]) -> str:
    """Compress the facts of all nodes. Thousands of similar nodes make a small message."""
    return base64.b64encode(zlib.compress(json.dumps(roster).encode(), 6)).decode()


def decode_roster(text: str) -> list[Facts]:
    roster: list[Facts] = json.loads(zlib.decompress(base64.b64decode(text)))
    return roster


def job_start_folder(environ: Mapping[str, str]) -> JobStartFolder | None:
    """Return the folder that all agents of this job start share, or None if the environment names
    none.
    """
    if env.RUN in environ and env.JOB_START in environ:
        return RunFolder(Path(environ[env.RUN])).job_start(environ[env.JOB_START])
    return None


def await_verdict(
    job_start: JobStartFolder, interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Wait for the verdict. If an agent exits before it, the scheduler may end the head agent
    too.
    """
    deadline = time.monotonic() + VERDICT_TIMEOUT
    while time.monotonic() < deadline and not job_start.verdict.exists() and not interrupted():
        time.sleep(0.2)
