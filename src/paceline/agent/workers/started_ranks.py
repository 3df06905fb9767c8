"""The ranks that one agent starts: what an attempt gives them, and the interface of each way to
start them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.agent.launcher_placement import Placement
from paceline.agent.workers import process_tree
from paceline.agent.workers.output import PER_RANK_LOGS, OutputCapture
from paceline.agent.workers.zygote.start import cannot_start
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder


@dataclass(frozen=True)
class Launch:
    """One attempt, as one agent starts it."""

    launch_spec: LaunchSpec
    placement: Placement
    attempt: AttemptFolder
    heartbeat: str
    address: str
    port: int
    environ: Mapping[str, str]
    extra: Mapping[str, str]  # network and data variables; never ones that the user has set

    def ranks(self) -> list[tuple[int, int]]:
        """Return (rank, local rank) of each rank that this agent starts."""
        return [
            (self.placement.first_rank + position, local_rank)
            for position, local_rank in enumerate(self.placement.local_ranks)
        ]

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log; a negative rank means the node itself."""
        if rank < 0 or self.shares_log:
            return self.attempt.node_log(self.placement.node)
        return self.attempt.log(rank)

    @property
    def shares_log(self) -> bool:
        """Whether all ranks of a node share one log: cluster file systems handle many files
        badly.
        """
        return self.launch_spec.world_size > PER_RANK_LOGS


@dataclass(frozen=True)
class Exit:
    """The end of a rank; a negative code is a signal."""

    local_rank: int
    code: int
    time: float


class StartedRanks(Protocol):
    """The ranks of this agent, started in one of several ways. Serves one attempt after another."""

    def start(self, launch: Launch, output: OutputCapture) -> list[int]:
        """Start the ranks of an attempt. Returns the local ranks whose ends `poll` will report."""

    def fileno(self) -> int | None:
        """Return a descriptor that is readable when `poll` has news; None where SIGCHLD says so."""
        return None

    def poll(self) -> list[Exit]:
        """Return the ranks that have ended since the last call."""

    def pids(self) -> dict[int, int]:
        """Map local ranks to the processes that still run."""

    def has_failed_rank(self) -> bool:
        """Whether a rank has failed although `poll` cannot report its end yet."""
        return False

    def kill_leftovers(self) -> None:
        """Kill every process that the ranks left behind."""
        process_tree.kill_descendants(os.getpid())

    def close(self) -> None:
        """Free all resources. Nothing can be started afterwards."""
        self.kill_leftovers()


def start_process(
    command: list[str], environ: Mapping[str, str], *, ends: tuple[int, int], reads_input: bool
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; `ends` take what it prints, and are closed here."""
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=None if reads_input else subprocess.DEVNULL,
            stdout=ends[0],
            stderr=ends[1],
            start_new_session=True,
        )
    except OSError as error:
        raise cannot_start(command[0], error) from error
    finally:
        for descriptor in ends:
            os.close(descriptor)
