"""Ranks that linger after others have exited, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.health import liveness
from paceline.agent.health.heartbeat import Heartbeats
from paceline.agent.health.liveness import Liveness
from paceline.agent.workers import process_tree
from paceline.agent.workers.process_tree import Usage, tree_usage
from paceline.contract.heartbeat_file import FINISHED, SAVED_AND_STOPPED, SLOT, slot_offset
from paceline.contract.run_folder import AttemptFolder
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


class Watched:
    """Ranks of one node with processes 1, 2, ...; rank 0 has exited. The clock is the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, *, exit_timeout: float) -> None:
        self.now, self.printed, self.usage = 1000.0, 0, dict.fromkeys(range(ranks), STILL)
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        monkeypatch.setattr(liveness, "time", clock)
        monkeypatch.setattr(
            process_tree, "tree_usage", lambda pids: {pid: self.usage[pid] for pid in pids}
        )
        monkeypatch.setattr(process_tree, "is_alive", lambda pid: True)
        launched: Any = SimpleNamespace(
            launch_spec=SimpleNamespace(style="fork", exit_timeout=exit_timeout, hang_timeout=0.0),
            attempt=AttemptFolder(Path("attempt-1"), 1),
            ranks=lambda: [(rank, rank) for rank in range(ranks)],
            placement=SimpleNamespace(is_head=True, count=1, host="a"),
        )
        workers: Any = SimpleNamespace(pids=lambda: {rank: rank for rank in range(1, ranks)})
        rendezvous: Any = SimpleNamespace(send=lambda message: None)
        output: Any = SimpleNamespace(count_bytes=lambda rank: self.printed)
        self.heartbeats = Heartbeats(ranks)
        self.ranks = Liveness(
            launched,
            workers=workers,
            output=output,
            heartbeats=self.heartbeats,
            rendezvous=rendezvous,
        )

    def overdue_after(self, left: set[int], most: float = 100.0, every: float = 1.0) -> float:
        """Return the seconds until these ranks are found to linger; 0 if they are not."""
        begin = self.now
        while self.now < begin + most:
            self.now += every
            if self.ranks.check(left, ended_agents=()):
                return self.now - begin
        return 0.0


STILL = Usage(0.0, 0, False, False)


def test_a_pause_of_the_whole_job_or_a_line_of_output_is_not_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However little it prints: a script that waits for something prints a line now and then."""
    watched = Watched(monkeypatch, 2, exit_timeout=30.0)
    assert watched.overdue_after({1}, most=25, every=5.0) == 0
    watched.now += 600.0
    assert watched.overdue_after({1}, most=30, every=5.0) == 0
    watched.printed = 2
    assert watched.overdue_after({1}, every=5.0) == 35, "its first check, then the timeout"
    watched.heartbeats.remove()


def test_a_rank_whose_child_or_fellow_has_ended_has_time_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, 3, exit_timeout=6.0)
    watched.usage[1] = Usage(0.0, 0, False, True)
    assert watched.overdue_after({1, 2}, most=50) == 0, "rank 1 has a child, and rank 2 may wait"
    watched.usage[1] = STILL
    assert watched.overdue_after({1, 2}, most=5) == 0, "the child has ended, and rank 1 goes on"
    assert watched.overdue_after({2}) == 7, "rank 1 has ended: its first check, then the timeout"
    watched.heartbeats.remove()


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
