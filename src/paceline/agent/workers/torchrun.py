"""Ranks that torchrun starts: it keeps its ways, and each rank still has its own log, signals and error report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

from paceline.agent.health.heartbeat import Beats
from paceline.agent.workers import processes
from paceline.agent.workers.environment import STREAMS
from paceline.agent.workers.output import Streams
from paceline.agent.workers.starter import Exit, Launch, sweep_here
from paceline.agent.workers.zygote.start import NOT_FROM_HERE, python_command
from paceline.contract.heartbeat_file import FINISHED, RUNNING, SAVED_AND_STOPPED
from paceline.errors import LaunchError

AGENT = -1  # torchrun's own output, which goes to the node's log
TORCHRUN = f"{NOT_FROM_HERE}; from torch.distributed.run import main; main()"
# Its summary of a failure is the only place where it tells the exit codes of ranks.
FAILED = re.compile(r"rank\s*: \d+ \(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+)")
GOT_TERM = re.compile(r"got signal: (15|Signals\.SIGTERM)")


class TorchrunRanks:
    """One torchrun per node, with a fixed rendezvous; it never restarts ranks itself."""

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._agent: subprocess.Popen[bytes] | None = None
        self._launch: Launch | None = None
        self._streams: Streams | None = None
        self._held: list[int] = []  # our copies of the ranks' ends, until they have opened them

    def start(self, launch: Launch, streams: Streams) -> list[int]:
        self._launch, self._streams = launch, streams
        pipes = {local_rank: streams.open(rank) for rank, local_rank in launch.ranks()}
        self._held = [descriptor for pair in pipes.values() for descriptor in pair]
        paths = {
            str(local_rank): [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in pair]
            for local_rank, pair in pipes.items()
        }
        launch_spec, place = launch.launch_spec, launch.place
        command = [
            launch_spec.python, "-c", TORCHRUN,
            f"--nnodes={place.nodes}", f"--node-rank={place.node}", f"--nproc-per-node={place.local_world_size}",
            f"--master-addr={launch.address}", f"--master-port={launch.port}", "--max-restarts=0",
            "--no-python", *python_command(launch_spec.python, "workers.entry"),
        ]  # fmt: skip
        output, errors = streams.open(AGENT, shown=False)
        common = {**launch.common(), STREAMS: json.dumps(paths)}
        try:
            self._agent = subprocess.Popen(
                command,
                env=common,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as problem:
            raise LaunchError(f"cannot start {launch_spec.python}: {problem.strerror}") from problem
        finally:
            os.close(output)
            os.close(errors)
        return [local_rank for _, local_rank in launch.ranks()]

    def fileno(self) -> int | None:
        return None

    def poll(self) -> list[Exit]:
        if self._agent is None:
            return []
        code = self._agent.poll()
        if code is None:
            if self._held and all(self._beats.read(each).state for each in self._local_ranks()):
                self._let_go()
            return []
        self._agent = None
        self._let_go()
        return self._ends(code)

    def pids(self) -> dict[int, int]:
        found = {}
        for local_rank in self._local_ranks() if self._agent is not None else ():
            pid = self._beats.read(local_rank).pid
            if pid and processes.alive(pid):
                found[local_rank] = pid
        return found

    def in_trouble(self) -> bool:
        """A rank that left an error, or is gone from the middle of its training: torchrun takes longer to say so."""
        if self._agent is None or self._launch is None:
            return False
        attempt = self._launch.attempt
        if any(attempt.error(rank).exists() for rank, _ in self._launch.ranks()):
            return True
        beats = [self._beats.read(each) for each in self._local_ranks()]
        return any(beat.state == RUNNING and not processes.alive(beat.pid) for beat in beats)

    def sweep(self) -> None:
        sweep_here()

    def close(self) -> None:
        self._let_go()
        if self._agent is not None:
            processes.send_group(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
            self._agent = None
        self.sweep()

    def _local_ranks(self) -> list[int]:
        return self._launch.place.local_ranks if self._launch is not None else []

    def _let_go(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held = []

    def _ends(self, code: int) -> list[Exit]:
        """What became of each rank. The root cause stands last in torchrun's summary, and goes first here."""
        now = time.time()
        if code == 0:
            return [Exit(local_rank, 0, now) for local_rank in self._local_ranks()]
        assert self._streams is not None
        sweep_here()  # so that its last words are all there
        told = self._streams.last_words(AGENT)
        failed = {int(local_rank): int(its) for local_rank, its in FAILED.findall(told)}
        ends = [Exit(local_rank, its, now) for local_rank, its in failed.items()]
        ends = ends[-1:] + ends[:-1]
        # Told by the scheduler to end, it passes that on and calls it an error, also when all ranks then stop well.
        by_term = code == -signal.SIGTERM or GOT_TERM.search(told)
        rest = -signal.SIGTERM if failed or by_term else code
        for each in self._local_ranks():
            if each not in failed:
                well = self._beats.read(each).state in (SAVED_AND_STOPPED, FINISHED)
                ends.append(Exit(each, 0 if well else rest, now))
        return ends
