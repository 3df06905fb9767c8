"""Hangs, as tables."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from paceline.agent.health.watchdog import Beat, Panorama, Watchdog, process_state, summary
from paceline.contract.heartbeat_file import ABSENT, FINISHED, READY, RUNNING, SAVED_AND_STOPPED

# each rank's (state, step, age) against a timeout of 10 s -> the ranks that are named, or None
TABLE: dict[str, tuple[list[tuple[int, int, float]], list[int] | None]] = {
    "all beat": ([(RUNNING, 5, 0.1), (RUNNING, 5, 9.9)], None),
    "warming up or compiling for long": ([(READY, 0, 900.0), (READY, 0, 900.0), (ABSENT, 0, 9e9)], None),
    "one still compiles, one already waits for it": ([(RUNNING, 1, 3.0), (READY, 0, 50.0)], None),
    "one behind, the rest wait": ([(RUNNING, 8, 12.0), (RUNNING, 7, 12.0), (RUNNING, 8, 12.0)], [1]),
    "all at one step: the oldest beat": ([(RUNNING, 8, 11.0), (RUNNING, 8, 11.0), (RUNNING, 8, 14.0)], [2]),
    "no telling them apart": ([(RUNNING, 8, 12.0), (RUNNING, 8, 12.1)], [1, 0]),
    "finished ranks owe nothing": ([(FINISHED, 9, 500.0), (RUNNING, 9, 2.0)], None),
    "saved and leaving": ([(SAVED_AND_STOPPED, 9, 500.0), (SAVED_AND_STOPPED, 9, 500.0)], None),
    "one left behind by those who finished": ([(FINISHED, 9, 500.0), (RUNNING, 8, 20.0)], [1]),
}


@pytest.mark.parametrize("case", TABLE)
def test_watchdog(case: str) -> None:
    slots, named = TABLE[case]
    beats = [Beat(rank, *slot, host=f"node{rank // 2}") for rank, slot in enumerate(slots)]
    hang = Watchdog(10).check(beats)
    assert (None if hang is None else [each.rank for each in hang.laggards]) == named
    assert Watchdog(0).check(beats) is None  # never mind


def test_a_rank_that_the_kernel_holds_is_the_one() -> None:
    beats = [Beat(0, RUNNING, 3, 12, "a"), Beat(1, RUNNING, 4, 12, "b", process="T")]
    hang = Watchdog(10).check(beats)
    assert hang is not None
    assert [each.rank for each in hang.laggards] == [1]
    assert hang.hosts == ["b"]
    assert "rank 1 on b" in str(hang)
    assert "stopped by a signal" in str(hang)


def test_the_head_sees_all_nodes() -> None:
    panorama = Panorama()
    told = summary([Beat(2, RUNNING, 6, 30, "b", 0.5, "S"), Beat(3, RUNNING, 7, 30, "b", 0.5, "S")])
    panorama.hear({**told, "from": 1})
    own = [Beat(0, RUNNING, 7, 30, "a"), Beat(1, RUNNING, 7, 30, "a")]
    hang = Watchdog(10).check(panorama.all(own))
    assert hang is not None
    assert [(each.rank, each.host) for each in hang.laggards] == [(2, "b")]
    panorama.forget()
    assert panorama.all(own) == own


def test_the_state_of_a_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            sleeper.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while process_state(sleeper.pid) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert process_state(sleeper.pid) == "T"
        finally:
            sleeper.kill()
    assert process_state(sleeper.pid) == ""
    assert process_state(os.getpid()) == "R"
