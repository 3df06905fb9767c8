"""Starting ranks, one class per way. All look alike from outside: start, poll for ends, sweep, close."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.agent.placement import Place
from paceline.agent.workers import processes
from paceline.agent.workers.environment import PARENT, common_variables, node_variables, rank_variables
from paceline.agent.workers.output import PER_RANK_LOGS, Streams
from paceline.agent.workers.zygote.start import python_command
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import AttemptFolder
from paceline.errors import LaunchError


@dataclass(frozen=True)
class Launch:
    """One attempt, as seen by one agent."""

    launch_spec: LaunchSpec
    place: Place
    attempt: AttemptFolder
    beat: str
    address: str
    port: int
    environ: Mapping[str, str]
    extra: Mapping[str, str]  # variables of the network and the like; what the user has set is not among them

    def ranks(self) -> list[tuple[int, int]]:
        """(rank, local rank) of those that this agent starts."""
        return [
            (self.place.first_rank + position, local_rank)
            for position, local_rank in enumerate(self.place.local_ranks)
        ]

    def log(self, rank: int) -> Path:
        """Where a rank's output goes; below 0 it is the node's own."""
        if rank < 0 or self.shares_log:
            return self.attempt.node_log(self.place.node)
        return self.attempt.log(rank)

    @property
    def shares_log(self) -> bool:
        """So many ranks that there is one log per node: file systems of clusters do not like many files."""
        return self.launch_spec.world_size > PER_RANK_LOGS

    def common(self) -> dict[str, str]:
        """Variables of every process of this node."""
        common = common_variables(
            self.launch_spec,
            environ=self.environ,
            attempt=self.attempt.number,
            beat=self.beat,
            extra=self.extra,
        )
        return {
            **common,
            **node_variables(self.launch_spec, self.place, address=self.address, port=self.port),
        }

    def own(self, rank: int, local_rank: int) -> dict[str, str]:
        """Variables of one rank."""
        return rank_variables(self.launch_spec, rank=rank, local_rank=local_rank, attempt=self.attempt.number)


@dataclass(frozen=True)
class Exit:
    """A rank has ended; a negative code is a signal."""

    local_rank: int
    code: int
    time: float


class Starter(Protocol):
    """A way of starting the ranks of a node. Used again for a relaunch."""

    def start(self, launch: Launch, streams: Streams) -> list[int]:
        """Begin an attempt. The local ranks whose ends will be told."""

    def fileno(self) -> int | None:
        """Readable when `poll` has something new; None where SIGCHLD tells."""

    def poll(self) -> list[Exit]:
        """Ranks that have ended since the last call."""

    def pids(self) -> dict[int, int]:
        """Local rank -> process, of those that still run and that we started ourselves."""

    def in_trouble(self) -> bool:
        """Whether a rank is known to have failed ahead of its end being told."""

    def sweep(self) -> None:
        """Kill whatever the ranks left behind."""

    def close(self) -> None:
        """Nothing more will be started."""


class FreshRanks:
    """Each rank is a Python of its own: where forking is unsafe, and one agent per rank (srun, mpirun)."""

    def __init__(self, *, per_node: bool = False) -> None:
        self._per_node = per_node  # style spawn: one process, which starts the ranks itself
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, launch: Launch, streams: Streams) -> list[int]:
        command = python_command(launch.launch_spec.python, "workers.entry")
        common = {**launch.common(), PARENT: str(os.getpid())}
        ranks = launch.ranks()[:1] if self._per_node else launch.ranks()
        for rank, local_rank in ranks:
            output, errors = streams.open(rank)
            own = {} if self._per_node else launch.own(rank, local_rank)
            try:
                self._running[local_rank] = subprocess.Popen(
                    command, env={**common, **own}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as problem:
                raise LaunchError(
                    f"cannot start {launch.launch_spec.python}: {problem.strerror}",
                    hint="the interpreter must exist on every node: check [environment] in paceline.toml",
                ) from problem
            finally:
                os.close(output)
                os.close(errors)
        return [local_rank for _, local_rank in ranks]

    def fileno(self) -> int | None:
        return None

    def poll(self) -> list[Exit]:
        found = []
        for local_rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[local_rank]
                found.append(Exit(local_rank, code, time.time()))
        return found

    def pids(self) -> dict[int, int]:
        return {local_rank: process.pid for local_rank, process in self._running.items()}

    def in_trouble(self) -> bool:
        return False

    def sweep(self) -> None:
        sweep_here()

    def close(self) -> None:
        self.sweep()


def sweep_here(spare: set[int] | None = None) -> None:
    """Kill all descendants of this agent but some, and bury them."""
    spare = spare or set()
    processes.sweep(os.getpid(), spare=spare)
    bury_orphans(spare)


def bury_orphans(spare: set[int]) -> None:
    """Collect the dead that this process has adopted. Its own children are waited for by who started them."""
    for pid in processes.dead_children(os.getpid()) - spare:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
