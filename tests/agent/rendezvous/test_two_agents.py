"""Two agents on this machine, over loopback, with real ranks: a fault on one node affects the other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.heartbeat_file import RUNNING, SLOT, slot_offset
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import (
    DONE,
    FAILED,
    RESTART_EXIT,
    STOPPED,
    RunFolder,
    read_verdict,
)
from paceline.launch.local_run import START_AGENT
from tests.fake_torch import write_fake_torch

WITHIN = 120.0  # seconds: two imports of torch on a busy machine

SCRIPT = """
import os, sys, time, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print("sum", int(total), "of", world, "node", os.environ["GROUP_RANK"], flush=True)
"""
READY = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("ready", flush=True)
"""
# Ranks that are connected, as over gloo: one that ends closes its connections, and the others notice it at once.
CONNECTED = """
import os, signal, socket, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
peers = []
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(world - 1)]
while not peers:
    try:
        peers = [socket.create_connection(address)]
    except OSError:
        time.sleep(0.02)
def all_reduce():
    for peer in peers:
        peer.sendall(b"x")
    for peer in peers:
        if not peer.recv(1):
            raise ConnectionError("Connection closed by peer")
all_reduce()
print("ready", os.environ["GROUP_RANK"], address[1], flush=True)
"""
WRONG_CLOCK = "import time; _now = time.time; time.time = lambda: _now() + {seconds}\n"
CLEANUP = "\ndist.destroy_process_group()\n"


class Pair:
    """A run of two agents. `light` runs use a fake torch and start fast."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        gpus_seen: tuple[str, str] = ("", ""),
        light: bool = False,
        clocks: tuple[int, int] = (0, 0),
        enter: tuple[list[str], list[str]] = ([], []),
        address: str = "127.0.0.1",
        **more: Any,
    ) -> None:
        self.gpus_seen, self.clocks = gpus_seen, clocks
        # commands that enter each agent's host, and the head agent's address
        self.enter, self.address = enter, address
        self.python_path = {"PYTHONPATH": str(write_fake_torch(folder.parent))} if light else {}
        self.run = RunFolder(folder)
        self.job_start = self.run.job_start("job_start")
        folder.mkdir()
        program = folder / "train.py"
        program.write_text(script)
        launch_spec = LaunchSpec(
            run_id="pair",
            program=str(program),
            args=[],
            python=sys.executable,
            cwd=str(folder),
            **{"nodes": 2, "kill_after": 2.0, **more},
        )
        self.run.launch_spec.write_text(launch_spec.to_json())
        self.processes = [self._start(index) for index in (0, 1)]

    def _start(self, index: int) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            **self.python_path,
            "PACELINE_RUN": str(self.run.path),
            "PACELINE_JOB_START": "job_start",
            "PACELINE_TOKEN": "s3cret",
            "PACELINE_AGENT": f"{index}/2",
            "SLURMD_NODENAME": "ab"[index],
            "CUDA_VISIBLE_DEVICES": self.gpus_seen[index],
            "PACELINE_RENDEZVOUS": f"{self.address}:0",  # the head agent takes a free port
        }
        with (self.run.path / f"console-{index}").open("w") as console:
            return subprocess.Popen(
                [
                    *self.enter[index],
                    sys.executable,
                    "-c",
                    WRONG_CLOCK.format(seconds=self.clocks[index]) + START_AGENT,
                ],
                env=environ,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def console(self, index: int = 0) -> str:
        return (self.run.path / f"console-{index}").read_text()

    def codes(self) -> list[int]:
        """Wait for both agents and return their exit codes."""
        return [process.wait(WITHIN) for process in self.processes]

    def log(self, rank: int, attempt: int = 1) -> str:
        path = self.run.attempt(attempt).log(rank)
        return path.read_text() if path.exists() else ""

    def await_that(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN
        while not holds():
            assert time.monotonic() < deadline, (
                f"the condition never held\n{self.console(0)}\n{self.console(1)}"
            )
            assert self.processes[0].poll() is None, (
                f"the head agent has ended\n{self.console(0)}\n{self.console(1)}"
            )
            time.sleep(0.05)

    def await_line(self, word: str, ranks: int, attempt: int = 1) -> None:
        self.await_that(lambda: all(word in self.log(rank, attempt) for rank in range(ranks)))

    def failure(self, attempt: int = 1) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run.attempt(attempt).failure.read_text())
        return found


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:
        yield lambda script, **more: stack.enter_context(Pair(tmp_path / "run", script, **more))


def test_one_world_over_two_agents(pair: Callable[..., Pair]) -> None:
    run = pair(SCRIPT + CLEANUP, nproc=2)
    assert run.codes() == [0, 0], run.console(0) + run.console(1)
    for rank in range(4):
        assert f"sum 6 of 4 node {rank // 2}" in run.log(rank)
    assert read_verdict(run.run.attempt(1).verdict) == DONE
    assert read_verdict(run.job_start.verdict) == DONE
    assert "s3cret" not in run.console(0) + run.console(1)


def test_a_failure_on_the_second_node_ends_both_and_is_named(pair: Callable[..., Pair]) -> None:
    run = pair(
        READY + "if rank == 1: raise ValueError('no such luck')\ntime.sleep(600)\n", light=True
    )
    assert run.codes() == [1, 1], run.console(0) + run.console(1)
    failure = run.failure()
    assert (failure["rank"], failure["host"], failure["type"]) == (1, "b", "ValueError")
    assert "rank 1 of 2 on host b failed" in run.console(0)
    assert "no such luck" in run.console(0)
    assert read_verdict(run.job_start.verdict) == FAILED


# Rank 0 fails first. Rank 1 is told to end, and fails too; by its own clock, that was an hour earlier.
BOTH_FAIL = f"""
import os, pathlib, signal, time
ready = pathlib.Path("ready")
if os.environ["RANK"] == "0":
    while not ready.exists(): time.sleep(0.02)
    raise ValueError("the first")
exec({WRONG_CLOCK.format(seconds=-3600)!r})
def fail(*_): raise RuntimeError("the second")
signal.signal(signal.SIGTERM, fail)
ready.touch()
time.sleep(600)
"""


def test_the_first_failure_is_found_whatever_the_clocks_say(pair: Callable[..., Pair]) -> None:
    run = pair(BOTH_FAIL, light=True, clocks=(0, -3600))
    assert run.codes() == [1, 1]
    assert (run.failure()["rank"], run.failure()["message"]) == (0, "the first"), run.console(0)


def test_a_killed_agent_is_not_a_lost_node(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as inside:
        inside.setenv("SLURM_JOB_ID", "1")
        run = pair(READY + "time.sleep(600)\n", light=True, max_restarts=3)
    run.await_line("ready", 2)
    run.processes[1].kill()
    assert run.codes()[0] == RESTART_EXIT
    assert (run.failure()["cause"], run.failure()["host"]) == ("killed", "b")
    # whoever started the agents starts them again
    assert read_verdict(run.job_start.verdict) is None
    assert run.job_start.agent.exists()
    assert not run.job_start.excluded_nodes.exists()
    assert run.job_start.node_lost.exists(), (
        "the batch script need not wait for that node, which may have died too"
    )


@pytest.mark.parametrize("queue", [False, True])
def test_a_head_agent_may_be_killed_before_the_others_join(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, queue: bool
) -> None:
    with monkeypatch.context() as inside:
        if queue:
            inside.setenv("SLURM_JOB_ID", "1")
        run = pair(READY, light=True, max_restarts=1)
        run.processes[1].send_signal(signal.SIGSTOP)
        run.await_that(run.job_start.head.exists)
        for process in run.processes:
            process.kill()
            process.wait()
        assert run.job_start.agent.exists(), "otherwise nobody starts the agents again"
        run.job_start.head.unlink()
        run.processes = [run._start(index) for index in (0, 1)]
    assert run.codes() == [0, 0], run.console(0) + run.console(1)
    # That costs no restart: whoever starts the agents counts it.
    assert "an agent was killed: restarting" not in run.console(0)


@pytest.mark.slow
def test_a_lost_node_is_named_and_the_rest_ended(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as inside:
        inside.setenv("SLURM_JOB_ID", "1")  # nodes are excluded only if a scheduler has others
        run = pair(READY + "time.sleep(600)\n", light=True, max_restarts=3)
    run.await_line("ready", 2)
    run.processes[1].send_signal(signal.SIGSTOP)
    assert run.processes[0].wait(120) == 1
    run.processes[1].kill()
    assert (run.failure()["cause"], run.failure()["host"]) == ("lost", "b")
    assert "node b" in run.console(0)
    assert not run.run.attempt(2).path.exists()  # there is no second node to restart on
    assert run.job_start.excluded_nodes.read_text() == "b\n"
    assert run.job_start.node_lost.exists(), "the batch script need not wait for that node"


def test_members_do_not_outlive_the_head(pair: Callable[..., Pair]) -> None:
    run = pair(READY + "time.sleep(600)\n", light=True)
    run.await_line("ready", 2)
    run.processes[0].kill()
    assert run.codes()[1] == 1
    assert read_verdict(run.job_start.verdict) in (None, FAILED)


@pytest.mark.parametrize("agent", [0, 1], ids=["head", "member"])
def test_sigterm_to_one_agent_stops_the_ranks_of_all_nodes(
    pair: Callable[..., Pair], agent: int
) -> None:
    """The script handles no signal, and notices closed connections at once."""
    run = pair(CONNECTED + "while True: all_reduce()\n", light=True, nproc=2)
    run.await_line("ready", 4)
    run.processes[agent].terminate()
    assert run.codes() == [0, 0], run.console(0) + run.console(1)
    assert read_verdict(run.run.attempt(1).verdict) == STOPPED
    assert read_verdict(run.job_start.verdict) == STOPPED


def test_ranks_that_linger_on_another_node_are_reported_and_ended(
    pair: Callable[..., Pair],
) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': time.sleep(3600)\n"
    run = pair(script, light=True, exit_timeout=1.5, max_restarts=3)
    assert run.codes() == [1, 1], run.console(0) + run.console(1)
    assert (run.failure()["cause"], run.failure()["rank"], run.failure()["host"]) == (
        "lingered",
        1,
        "b",
    )
    assert (
        "rank 1 of 2 on host b failed: it made no progress for 1.5 s after other ranks had exited"
        in run.console(0)
    )
    assert 'train.py", line 2 in <module>' in run.console(0)
    assert "no restart: some ranks had already finished" in run.console(0)
    assert read_verdict(run.job_start.verdict) == FAILED


def test_a_killed_rank_is_restarted_on_both_nodes(pair: Callable[..., Pair]) -> None:
    once = "if rank == 1 and os.environ['PACELINE_ATTEMPT'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    run = pair(CONNECTED + once + "all_reduce()\n", light=True, max_restarts=2)
    assert run.codes() == [0, 0], run.console(0) + run.console(1)
    assert [read_verdict(each.verdict) for each in run.run.attempts()] == [FAILED, DONE]
    failure = run.failure()
    assert (failure["rank"], failure["host"], failure["code"]) == (1, "b", -signal.SIGKILL)
    ports = [run.log(0, attempt).split()[2] for attempt in (1, 2)]
    assert ports[0] != ports[1]
    assert run.log(1, 2).startswith("ready 1")


# Sends heartbeats as the runtime does, without naming it: a script that names it has it preloaded.
HEARTBEAT = f"""
import mmap, struct
slot = struct.Struct({SLOT.format!r})
file = open(os.environ["PACELINE_HEARTBEAT"], "r+b")
memory = mmap.mmap(file.fileno(), 0)
for step in range(1, 10**9):
    slot.pack_into(memory, {slot_offset(0)}, {RUNNING}, step, os.getpid(), time.time(), 0.1)
    dist.all_reduce(total)
    if rank == 1 and step == 20:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)
"""


def test_a_hang_names_the_rank_and_its_node(pair: Callable[..., Pair]) -> None:
    run = pair(SCRIPT + HEARTBEAT, hang_timeout=10.0)
    assert run.codes() == [1, 1], run.console(0) + run.console(1)
    failure = run.failure()
    assert (failure["cause"], failure["rank"], failure["host"]) == ("hang", 1, "b")
    assert re.search(r"; rank 1 on b (has|is stuck)", run.console(0)), run.console(0)
    assert "all_reduce" in run.run.attempt(1).stacks(0).read_text()  # rank 0 waits for it


def test_an_unfit_node_ends_both_before_any_rank_starts(pair: Callable[..., Pair]) -> None:
    """Node b sees one GPU too few: it is named and excluded, and there is no attempt."""
    run = pair("print('never')", light=True, gpus=2, gpus_seen=("0,1", "0"))
    assert run.codes() == [1, 1]
    assert "node b: 1 of the 2 GPUs requested are visible" in run.console(0)
    assert run.job_start.excluded_nodes.read_text() == "b\n"
    assert read_verdict(run.job_start.verdict) == FAILED
    assert not run.log(0)
