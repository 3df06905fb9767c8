"""Ranks as fresh Python processes: where forking is unsafe, and where there is one agent per rank
(srun, mpirun).
"""

from __future__ import annotations

import os
import subprocess
import time

from paceline.agent.python_command import python_command
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Exit, Launch, kill_descendants
from paceline.agent.workers.zygote.start import cannot_start
from paceline.contract import env


class ExecRanks:
    """One Python process per rank; with style spawn one per node, which starts the ranks itself."""

    def __init__(self, *, per_node: bool = False) -> None:
        self._per_node = per_node
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, launch: Launch, output: OutputCapture) -> list[int]:
        command = python_command(launch.launch_spec.python, "agent.workers.bootstrap")
        common = {**launch.common_environ(), env.PARENT: str(os.getpid())}
        ranks = launch.ranks()[:1] if self._per_node else launch.ranks()
        for rank, local_rank in ranks:
            stdout, stderr = output.open(rank)
            variables = {} if self._per_node else launch.rank_environ(rank, local_rank)
            try:
                self._running[local_rank] = subprocess.Popen(
                    command,
                    env={**common, **variables},
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
            except OSError as error:
                raise cannot_start(launch.launch_spec.python, error) from error
            finally:
                os.close(stdout)
                os.close(stderr)
        return [local_rank for _, local_rank in ranks]

    def fileno(self) -> int | None:
        return None

    def poll(self) -> list[Exit]:
        exits = []
        for local_rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[local_rank]
                exits.append(Exit(local_rank, code, time.time()))
        return exits

    def pids(self) -> dict[int, int]:
        return {local_rank: process.pid for local_rank, process in self._running.items()}

    def has_failed_rank(self) -> bool:
        return False

    def kill_leftovers(self) -> None:
        kill_descendants()

    def close(self) -> None:
        self.kill_leftovers()
