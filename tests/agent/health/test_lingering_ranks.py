"""Ranks that linger after others have exited, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.health import lingering_ranks
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.health.lingering_ranks import LingeringRanks
from paceline.agent.workers import process_tree
from paceline.agent.workers.process_tree import Usage, tree_usage
from paceline.contract.heartbeat_file import FINISHED, SAVED_AND_STOPPED, SLOT, slot_offset
from tests.agent.conftest import Launch, until

# Rank 0 exits at once; rank 1 writes a state as the runtime does (0: it has none), and stays.
STAYS = f"""
import os, struct, sys, time
def send_heartbeat(state):
    with open(os.environ["PACELINE_HEARTBEAT"], "r+b") as file:
        file.seek({slot_offset(0)} + {slot_offset(1) - slot_offset(0)} * int(os.environ["LOCAL_RANK"]))
        file.write(struct.pack({SLOT.format!r}, state, 3, os.getpid(), time.time(), 0.1))
if STATE: send_heartbeat(STATE)
if os.environ["RANK"] == "0": sys.exit(0)
"""
IDLE = "time.sleep(3600)\n"
# As a deadlock in a destructor, after the script and its exit handlers.
IDLE_AT_EXIT = """
class Stays:
    def __del__(self, sleep=time.sleep): sleep(3600)
stays = Stays()
"""
ENDS = {
    "without the runtime": (0, IDLE, "failed"),
    "after its session": (FINISHED, IDLE, "failed"),
    "in an exit handler": (
        FINISHED,
        "import atexit\natexit.register(lambda: time.sleep(3600))\n",
        "failed",
    ),
    "after its script": (FINISHED, IDLE_AT_EXIT, "done"),
    "after it has saved and stopped": (SAVED_AND_STOPPED, IDLE, "stopped"),
}


@pytest.mark.parametrize(("state", "idle", "verdict"), ENDS.values(), ids=ENDS)
def test_lingering_ranks_are_ended(launch: Launch, state: int, idle: str, verdict: str) -> None:
    """If the script has ended, only the process did not exit, and the work is complete."""
    started = launch(f"STATE = {state}\n{STAYS}{idle}", exit_timeout=0.8, max_restarts=2)
    assert started.wait() == (1 if verdict == "failed" else 0), started.err()
    assert started.verdicts() == (verdict, verdict)
    if verdict == "failed":
        assert (started.failure()["cause"], started.failure()["rank"]) == ("lingered", 1)
        assert (
            "made no progress for 0.8 s after other ranks had exited; to change this"
            in started.err()
        )
        assert "no restart: some ranks had already finished" in started.err()
    else:
        assert "these were killed after 0.8 s without progress: rank 1 on" in started.err()
    assert "train.py" in started.attempt().stacks(1).read_text()


# Each for longer than the timeout: it computes, downloads, sends heartbeats, waits for a
# process that computes, and for one that does nothing itself.
WORKS = """
end = time.time() + 2.5
while time.time() < end: pass
for _ in range(25):
    time.sleep(0.1)
    with open("part", "ab") as file: file.write(bytes(1000))
for _ in range(25):
    time.sleep(0.1)
    send_heartbeat(2)
import subprocess
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 2.5: pass"])
subprocess.run(["sleep", "6"])
open("worked", "w").close()
"""


def test_a_rank_that_works_may_outlive_the_others(launch: Launch) -> None:
    """And another one, idle, may wait for it. It looks rarely: a tick of CPU time would count as progress."""
    waits = "if os.environ['RANK'] == '2':\n    while not os.path.exists('worked'): time.sleep(0.5)\n    sys.exit(0)\n"
    started = launch(f"STATE = 0\n{STAYS}{waits}{WORKS}", nproc=3, exit_timeout=2.0)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("done", "done")


def test_a_pause_of_the_whole_job_is_not_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cpu = 1000.0, 0.0
    monkeypatch.setattr(lingering_ranks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        process_tree, "tree_usage", lambda pids: {pid: Usage(cpu, 0, False, False) for pid in pids}
    )
    launched: Any = SimpleNamespace(
        launch_spec=SimpleNamespace(style="fork", exit_timeout=30.0),
        attempt=None,
        ranks=lambda: [(0, 0), (1, 1)],
        placement=SimpleNamespace(is_head=True, count=1, host="a"),
    )
    workers: Any = SimpleNamespace(pids=lambda: {1: os.getpid()})
    rendezvous: Any = SimpleNamespace(send=lambda message: None)
    heartbeats = Heartbeats(2)
    monitor = LingeringRanks(
        launched, workers=workers, heartbeats=heartbeats, rendezvous=rendezvous
    )
    for seconds in (0.0, 5.0, 5.0, 600.0, 5.0, 5.0):
        now, cpu = now + seconds, cpu + 2.0
        assert monitor.check({1}, ended_agents=()) == []
    for _ in range(5):  # it does nothing from now on
        now += 5.0
        assert monitor.check({1}, ended_agents=()) == []
    now += 5.0
    assert [(idle.rank, idle.seconds) for idle in monitor.check({1}, ended_agents=())] == [
        (1, 30.0)
    ]
    heartbeats.remove()


def test_a_rank_whose_child_or_fellow_has_ended_has_time_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, with_children = 1000.0, {1: True, 2: False}
    monkeypatch.setattr(lingering_ranks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        process_tree,
        "tree_usage",
        lambda pids: {pid: Usage(0.0, 0, False, with_children[pid]) for pid in pids},
    )
    monkeypatch.setattr(process_tree, "is_alive", lambda pid: True)
    launched: Any = SimpleNamespace(
        launch_spec=SimpleNamespace(style="fork", exit_timeout=6.0),
        attempt=None,
        ranks=lambda: [(0, 0), (1, 1), (2, 2)],
        placement=SimpleNamespace(is_head=True, count=1, host="a"),
    )
    workers: Any = SimpleNamespace(pids=lambda: {1: 1, 2: 2})
    rendezvous: Any = SimpleNamespace(send=lambda message: None)
    ranks = LingeringRanks(
        launched, workers=workers, heartbeats=Heartbeats(3), rendezvous=rendezvous
    )

    def overdue_after(left: set[int], most: int = 100) -> int:
        nonlocal now
        for seconds in range(1, most + 1):
            now += 1.0
            if ranks.check(left, ended_agents=()):
                return seconds
        return 0

    assert overdue_after({1, 2}, most=50) == 0, "rank 1 has a child, and rank 2 may wait for it"
    with_children[1] = False
    assert overdue_after({1, 2}, most=5) == 0, "the child has ended, and rank 1 goes on"
    assert overdue_after({2}) == 7, "rank 1 has ended: its first check, then the timeout"


def test_any_thread_may_wait_for_a_disk(tmp_path: Path) -> None:
    """As one that starts a process: uninterruptible, until the child has opened its files."""
    os.mkfifo(tmp_path / "fifo")
    script = """
import os, sys, threading
action = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)
thread = threading.Thread(target=os.posix_spawn, args=("/bin/true", ["true"], {}), kwargs={"file_actions": [action]})
thread.start()
thread.join()
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "fifo")]) as process:
        try:
            until(
                lambda: tree_usage([process.pid])[process.pid].is_suspended, "a thread that waits"
            )
        finally:
            # open until the end: the child may come late
            writer = os.open(tmp_path / "fifo", os.O_RDWR)
            process.wait()
            os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["torchrun", "spawn"])
def test_styles_that_do_not_report_exits(launch: Launch, style: str) -> None:
    script = f"STATE = 0\n{STAYS}{IDLE}"
    if style == "spawn":
        body = "\n    ".join(script.splitlines())
        script = f"import paceline\ndef work():\n    {body}\nif __name__ == '__main__':\n    paceline.spawn(work)\n"
    started = launch(script, style=style, light=False, exit_timeout=2.0)
    assert started.wait() == 1, started.err()
    assert (started.failure()["cause"], started.failure()["rank"]) == ("lingered", 1)
