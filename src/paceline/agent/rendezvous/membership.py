"""The errors of agents that find, miss or lose each other, and how an agent with an error ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.contract.run_folder import JobStartFolder
from paceline.errors import LaunchError

# seconds that an agent with an error waits for the head agent to end the run
VERDICT_TIMEOUT = 15.0


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


def await_verdict(
    job_start: JobStartFolder, interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Wait for the verdict. If an agent exits before it, the scheduler may end the head agent
    too.
    """
    deadline = time.monotonic() + VERDICT_TIMEOUT
    while time.monotonic() < deadline and not job_start.verdict.exists() and not interrupted():
        time.sleep(0.2)
