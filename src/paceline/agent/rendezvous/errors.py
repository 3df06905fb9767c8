"""What can go wrong while agents wait for each other."""

from __future__ import annotations

from paceline.errors import LaunchError


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
