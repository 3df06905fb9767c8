"""Ranks that linger after others have exited, with real processes."""

from __future__ import annotations

import pytest

from paceline.contract.heartbeat_file import FINISHED, SAVED_AND_STOPPED, SLOT, slot_offset
from tests.agent.conftest import Launch

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


@pytest.mark.parametrize(("state", "verdict"), [(0, "failed"), (FINISHED, "done"), (SAVED_AND_STOPPED, "stopped")])
def test_lingering_ranks_are_ended(launch: Launch, state: int, verdict: str) -> None:
    """If the runtime has finished, only the process did not exit, and the work is complete."""
    started = launch(f"STATE = {state}\n{STAYS}{IDLE}", exit_timeout=0.8, max_restarts=2)
    assert started.wait() == (1 if verdict == "failed" else 0), started.err()
    assert started.verdicts() == (verdict, verdict)
    if verdict == "failed":
        assert (started.failure()["cause"], started.failure()["rank"]) == ("lingered", 1)
        assert "did nothing for 0.8 s after other ranks had exited" in started.err()
        assert "no restart: some ranks had already finished" in started.err()
    else:
        assert "these were ended after 0.8 s without progress: rank 1 on" in started.err()
    assert "train.py" in started.attempt().stacks(1).read_text()


# Each for longer than the timeout: it computes, downloads, sends heartbeats, waits for a process that computes.
WORKS = """
end = time.time() + 2
while time.time() < end: pass
for _ in range(20):
    time.sleep(0.1)
    with open("part", "ab") as file: file.write(bytes(1000))
for _ in range(20):
    time.sleep(0.1)
    send_heartbeat(2)
import subprocess
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 2: pass"])
open("worked", "w").close()
"""


def test_a_rank_that_works_may_outlive_the_others(launch: Launch) -> None:
    """And another one, idle, may wait for it."""
    waits = "if os.environ['RANK'] == '2':\n    while not os.path.exists('worked'): time.sleep(0.05)\n    sys.exit(0)\n"
    started = launch(f"STATE = 0\n{STAYS}{waits}{WORKS}", nproc=3, exit_timeout=1.5)
    assert started.wait() == 0, started.err()
    assert started.verdicts() == ("done", "done")


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
