"""The ways to start the ranks of an agent, and which of them its attempts use: forked by a zygote,
started by torchrun, or as fresh processes.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.launcher_placement import Placement
from paceline.agent.workers.forked_ranks import ForkedRanks, UnsafeToFork
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.started_ranks import Exit, Launch, StartedRanks, start_process
from paceline.agent.workers.torchrun_ranks import TorchrunRanks
from paceline.agent.workers.zygote.start import python_command
from paceline.contract import env
from paceline.contract.launch_spec import LaunchSpec


class ExecRanks(StartedRanks):
    """One Python process per rank: where forking is unsafe, and where there is one agent per rank
    (srun, mpirun). With style spawn one per node, which starts the ranks itself.
    """

    def __init__(self, *, per_node: bool = False) -> None:
        self._per_node = per_node
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, launch: Launch, output: OutputCapture) -> list[int]:
        command = python_command(launch.launch_spec.python, "agent.workers.bootstrap")
        common = {**launch.common_environ(), env.PARENT: str(os.getpid())}
        ranks = launch.ranks()[:1] if self._per_node else launch.ranks()
        for rank, local_rank in ranks:
            variables = {} if self._per_node else launch.rank_environ(rank, local_rank)
            self._running[local_rank] = start_process(
                command, {**common, **variables}, ends=output.open(rank), reads_input=rank == 0
            )
        return [local_rank for _, local_rank in ranks]

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


class GroupSelection:
    """Selects a worker group once; restarts use the same one. `zygote` is the one that `main`
    started.
    """

    def __init__(
        self,
        launch_spec: LaunchSpec,
        environ: Mapping[str, str],
        *,
        zygote: ForkedRanks | None,
        interrupted: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._launch_spec, self._environ = launch_spec, environ
        self._zygote = zygote
        self._selected: StartedRanks | None = None
        self._interrupted, self._say = interrupted, say
        # Rank 0 of every attempt reads a file from here on: all share one position in it.
        self._input = os.lseek(0, 0, os.SEEK_CUR) if os.path.isfile(0) else None

    def select(self, placement: Placement, heartbeats: Heartbeats) -> StartedRanks:
        """Return the worker group for the next attempt. Wait until its zygote has imported
        torch.
        """
        if self._input is not None:
            os.lseek(0, self._input, os.SEEK_SET)
        if self._zygote is not None and self._zygote_is_ready():
            return self._zygote
        if self._selected is None:
            style = self._launch_spec.style
            # mpirun starts one agent per rank, or one per node whose ranks torchrun starts.
            per_rank = placement.count == self._launch_spec.world_size
            if style == "torchrun" or (style == "mpirun" and not per_rank):
                self._selected = TorchrunRanks(heartbeats)
            else:
                self._selected = ExecRanks(per_node=style == "spawn")
        return self._selected

    def close(self) -> None:
        for group in (self._selected, self._zygote):
            if group is not None:
                group.close()

    def _zygote_is_ready(self) -> bool:
        """Wait for the zygote; replace one that was killed, and close one that must not fork."""
        assert self._zygote is not None
        if self._zygote.gone:
            self._zygote.close()
            environ = {name: value for name, value in self._environ.items() if name != env.ZYGOTE}
            self._zygote = ForkedRanks.prepare(self._launch_spec, environ)
        try:
            self._zygote.wait_until_ready(self._interrupted, self._say)
        except UnsafeToFork as why:
            self._say(f"starting ranks as new processes instead of forking them: {why}")
            self._zygote.close()
            self._zygote = None
            return False
        return True
