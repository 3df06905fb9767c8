"""The ways to start the ranks of an agent, and which of them its attempts use: forked by a zygote,
started by torchrun, or as fresh processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.launcher_placement import Placement
from paceline.agent.workers import process_tree
from paceline.agent.workers.forked_ranks import ForkedRanks, UnsafeToFork
from paceline.agent.workers.output import OutputCapture
from paceline.agent.workers.rank_variables import common_variables, rank_variables
from paceline.agent.workers.started_ranks import Exit, Launch, StartedRanks, start_process
from paceline.agent.workers.zygote.start import python_command
from paceline.contract import env
from paceline.contract.heartbeat_file import FINISHED, RUNNING, SAVED_AND_STOPPED
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.process import die_with_parent

TORCHRUN = -1  # the "rank" of torchrun's own output, which goes to the node's log
# torchrun reports the exit codes of its ranks only in its failure summary.
FAILED_RANK = re.compile(r"rank\s*: \d+ \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+)")
GOT_TERM = re.compile(r"got signal: (15|Signals\.SIGTERM)")


def main(args: list[str]) -> None:
    """Run torchrun in this process, and end with the agent that started it, whose process ID comes
    first.
    """
    die_with_parent(int(args[0]))
    from torch.distributed.run import main as run_torchrun

    run_torchrun(args[1:])


class TorchrunRanks(StartedRanks):
    """One torchrun per node, with a fixed rendezvous; it never restarts ranks itself."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._launch: Launch | None = None
        self._output: OutputCapture | None = None
        # our copies of the ranks' ends, which the ranks open
        self._pipes: list[int] = []

    def start(self, launch: Launch, output: OutputCapture) -> list[int]:
        self._launch, self._output = launch, output
        pipes = {local_rank: output.open(rank) for rank, local_rank in launch.ranks()}
        self._pipes = [descriptor for pair in pipes.values() for descriptor in pair]
        paths = {
            str(local_rank): [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in pair]
            for local_rank, pair in pipes.items()
        }
        launch_spec, placement = launch.launch_spec, launch.placement
        command = [
            *python_command(launch_spec.python, "agent.workers.group_selection"),
            str(os.getpid()),
            f"--nnodes={placement.nodes}",
            f"--node-rank={placement.node}",
            f"--nproc-per-node={placement.local_world_size}",
            f"--master-addr={launch.address}",
            f"--master-port={launch.port}",
            f"--rdzv-id={launch_spec.run_number}",
            "--max-restarts=0",
            # else it makes a folder in TMPDIR for every attempt, and never removes it
            f"--log-dir={os.devnull}",
            "--no-python",
            *python_command(launch_spec.python, "agent.workers.bootstrap"),
        ]
        self._torchrun = start_process(
            command,
            {**common_variables(launch), env.OUTPUT_PIPES: json.dumps(paths)},
            ends=output.open(TORCHRUN, shown=False),
            reads_input=placement.node == 0,
        )
        return [local_rank for _, local_rank in launch.ranks()]

    def poll(self) -> list[Exit]:
        if self._torchrun is None:
            return []
        code = self._torchrun.poll()
        if code is None:
            return []
        self._torchrun = None
        self._close_pipes()
        return self._exits(code)

    def pids(self) -> dict[int, int]:
        """Until a rank has started, torchrun stands for the first one: it may wait for another
        node for long.
        """
        found: dict[int, int] = {}
        if self._torchrun is None:
            return found
        if not any(self._heartbeats.read(local_rank).pid for local_rank in self._local_ranks()):
            return {self._local_ranks()[0]: self._torchrun.pid}
        for local_rank in self._local_ranks():
            pid = self._heartbeats.read(local_rank).pid
            if pid and process_tree.is_alive(pid):
                found[local_rank] = pid
        return found

    def has_failed_rank(self) -> bool:
        """Whether a rank left an error report or vanished while training; torchrun reports that
        later.
        """
        if self._torchrun is None or self._launch is None:
            return False
        attempt = self._launch.attempt
        if any(attempt.error(rank).exists() for rank, _ in self._launch.ranks()):
            return True
        heartbeats = [self._heartbeats.read(each) for each in self._local_ranks()]
        return any(
            heartbeat.state == RUNNING and not process_tree.is_alive(heartbeat.pid)
            for heartbeat in heartbeats
        )

    def close(self) -> None:
        self._close_pipes()
        if self._torchrun is not None:
            process_tree.signal_group(self._torchrun.pid, signal.SIGKILL)
            self._torchrun.wait()
            self._torchrun = None
        self.kill_leftovers()

    def _local_ranks(self) -> list[int]:
        return self._launch.placement.local_ranks if self._launch is not None else []

    def _close_pipes(self) -> None:
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes = []

    def _exits(self, code: int) -> list[Exit]:
        """Return how each rank ended, the root cause first; it is last in torchrun's summary."""
        now = time.time()
        if code == 0:
            return [Exit(local_rank, 0, now) for local_rank in self._local_ranks()]
        assert self._output is not None
        self.kill_leftovers()  # so that all of its output has arrived
        summary = self._output.tail(TORCHRUN)
        codes = {
            int(local_rank): int(its_code) for local_rank, its_code in FAILED_RANK.findall(summary)
        }
        exits = [Exit(local_rank, its_code, now) for local_rank, its_code in codes.items()]
        exits = exits[-1:] + exits[:-1]
        # When the scheduler ends torchrun, it passes SIGTERM on and reports an error, even if all
        # ranks stop cleanly.
        by_term = code == -signal.SIGTERM or GOT_TERM.search(summary)
        other_code = -signal.SIGTERM if codes or by_term else code
        for local_rank in self._local_ranks():
            if local_rank not in codes:
                is_clean = self._heartbeats.read(local_rank).state in (SAVED_AND_STOPPED, FINISHED)
                exits.append(Exit(local_rank, 0 if is_clean else other_code, now))
        return exits


class ExecRanks(StartedRanks):
    """One Python process per rank: where forking is unsafe, and where there is one agent per rank
    (srun, mpirun). With style spawn one per node, which starts the ranks itself.
    """

    def __init__(self, *, per_node: bool = False) -> None:
        self._per_node = per_node
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, launch: Launch, output: OutputCapture) -> list[int]:
        command = python_command(launch.launch_spec.python, "agent.workers.bootstrap")
        common = {**common_variables(launch), env.PARENT: str(os.getpid())}
        ranks = launch.ranks()[:1] if self._per_node else launch.ranks()
        for rank, local_rank in ranks:
            variables = {} if self._per_node else rank_variables(launch, rank, local_rank)
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
