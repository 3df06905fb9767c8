"""Which ranks the watchdog finds, as tables."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.health.liveness import RankLife, find_hang
from paceline.agent.workers import process_tree
from paceline.contract.heartbeat_file import ABSENT, FINISHED, READY, RUNNING, SAVED_AND_STOPPED
from paceline.contract.stacks import Frame, Stack

# each rank's (state, step, age) with a timeout of 10 s -> the stuck ranks, or None
TABLE: dict[str, tuple[list[tuple[int, int, float]], list[int] | None]] = {
    "all send heartbeats": ([(RUNNING, 5, 0.1), (RUNNING, 5, 9.9)], None),
    "a long compilation": ([(READY, 0, 900.0), (READY, 0, 900.0), (ABSENT, 0, 9e9)], None),
    "one rank compiles, the other waits for it": ([(RUNNING, 1, 3.0), (READY, 0, 50.0)], None),
    "no step boundaries, and nobody does anything": ([(READY, 0, 12.0), (READY, 0, 11.0)], [0, 1]),
    "no step boundaries, and one rank computes": ([(READY, 0, 12.0), (READY, 0, 2.0)], None),
    "one behind, the rest wait": (
        [(RUNNING, 8, 12.0), (RUNNING, 7, 12.0), (RUNNING, 8, 12.0)],
        [1],
    ),
    "all at one step: the oldest heartbeat": (
        [(RUNNING, 8, 11.0), (RUNNING, 8, 11.0), (RUNNING, 8, 14.0)],
        [2],
    ),
    "no difference between them": ([(RUNNING, 8, 12.0), (RUNNING, 8, 12.1)], [1, 0]),
    "finished ranks send nothing more": ([(FINISHED, 9, 500.0), (RUNNING, 9, 2.0)], None),
    "saved and stopping": ([(SAVED_AND_STOPPED, 9, 500.0), (SAVED_AND_STOPPED, 9, 500.0)], None),
    "one rank has not finished": ([(FINISHED, 9, 500.0), (RUNNING, 8, 20.0)], [1]),
}


@pytest.mark.parametrize("case", TABLE)
def test_watchdog(case: str) -> None:
    slots, stuck = TABLE[case]
    heartbeats = [RankLife(rank, *slot, host=f"node{rank // 2}") for rank, slot in enumerate(slots)]
    hang = find_hang(heartbeats, 10)
    assert (None if hang is None else [each.rank for each in hang.stuck]) == stuck
    assert find_hang(heartbeats, 0) is None  # turned off


def test_a_rank_that_the_kernel_holds_is_stuck() -> None:
    heartbeats = [RankLife(0, RUNNING, 3, 12, "a"), RankLife(1, RUNNING, 4, 12, "b", process="T")]
    hang = find_hang(heartbeats, 10)
    assert hang is not None
    assert [(each.rank, each.host) for each in hang.stuck] == [(1, "b")]
    assert "rank 1 on b" in str(hang)
    assert "stopped by a signal" in str(hang)


def test_ranks_that_stop_at_the_same_moment_are_not_listed() -> None:
    """None of them is the cause, as far as heartbeats tell."""
    alike = [RankLife(rank, RUNNING, 3, 12.0, "a") for rank in range(2)]
    assert str(find_hang(alike, 10)) == (
        "no progress for 12 s; all 2 ranks are stuck at step 3, none longer than the others: compare their stacks"
    )
    assert "rank 0 on a is stuck at step 3" in str(find_hang(alike[:1], 10))


@pytest.mark.parametrize("state", [READY, RUNNING])
def test_a_rank_outside_of_any_collective_is_named(state: int) -> None:
    """The one that waits for it may have been silent for longer."""
    heartbeats = [RankLife(0, state, 3, 14.0, "a"), RankLife(1, state, 3, 12.0, "b")]
    waits = Stack(
        (Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce"),)
    )
    sleeps = Stack((Frame("/p/hang.py", 7, "main"),))
    hang = find_hang(heartbeats, 10)
    assert hang is not None
    named = hang.compare_stacks(heartbeats, {0: waits, 1: sleeps})
    assert named.first.rank == 1
    assert "rank 1 on b has not reached the point where the others wait (hang.py:7 in main)" in str(
        named
    )
    for stacks in ({}, {0: waits}, {0: waits, 1: waits}, {0: sleeps, 1: sleeps}):
        assert hang.compare_stacks(heartbeats, stacks) == hang


def test_a_plain_script_that_does_nothing_hangs(
    paceline: Callable[..., Any], tmp_path: Path
) -> None:
    """It computes in silence first, for longer than the timeout."""
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "while time.process_time() < 1.5: pass\n"
        "print('computed', flush=True)\n"
        "time.sleep(600)\n"
    )
    done = paceline(
        "run", "--cpu", "--nproc", "2", "--hang-timeout", "1s", "train.py", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "computed" in done.stdout
    assert re.search(
        r"2 ranks printed nothing and used almost no CPU time, disk or network for \d+ s \(--hang-timeout 1s\)",
        done.stderr,
    )


def test_the_state_of_a_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            sleeper.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while process_tree.state(sleeper.pid) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process_tree.state(sleeper.pid) == "T"
        finally:
            sleeper.kill()
    assert process_tree.state(sleeper.pid) == ""
    assert process_tree.state(os.getpid()) == "R"
