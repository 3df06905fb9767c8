"""Goodput of timelines with known totals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.run_folder import RunFolder
from paceline.watch.goodput import SHARES, compute_goodput, find_end, read_events


def at(time: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": event, **fields}


def test_an_undisturbed_run() -> None:
    result = compute_goodput(
        [
            at(0, "queued"),
            at(10, "started"),
            at(11, "ranks"),
            at(15, "training", step=0),
            at(50, "saving", step=100, blocked=2.0),
            at(100, "done"),
        ]
    )
    assert result.seconds == {
        "queued": 10,
        "starting": 5,
        "running": 0,
        "training": 83,
        "saving": 2,
        "lost": 0,
        "idle": 0,
    }
    assert result.total == 100
    assert result.share("training") == pytest.approx(0.83)


def test_a_crash_loses_steps_and_the_wait_is_idle() -> None:
    result = compute_goodput(
        [
            at(0, "started"),
            at(1, "ranks"),
            at(5, "training", step=0),
            at(25, "saving", step=20, blocked=1.0),
            at(40, "failed"),  # 15 s after the save: repeated
            at(43, "ranks"),
            at(45, "training", step=20),
            at(60, "done"),
        ]
    )
    assert result.seconds == {
        "queued": 0,
        "starting": 7,
        "running": 0,
        "training": 34,
        "saving": 1,
        "lost": 15,
        "idle": 3,
    }
    assert result.attempts == 2


def test_a_script_without_step_boundaries_runs_and_does_not_start_forever() -> None:
    events = [
        at(0, "started"),
        at(1, "ranks", uses_runtime=False),
        at(30, "failed"),
        at(31, "ranks", uses_runtime=False),
    ]
    result = compute_goodput([*events, at(100, "done")])
    assert (result.seconds["starting"], result.seconds["running"], result.seconds["idle"]) == (1, 98, 1)
    late = compute_goodput([*events, at(41, "training", step=0), at(100, "done")])  # it has boundaries after all
    assert (late.seconds["starting"], late.seconds["running"], late.seconds["training"]) == (11, 29, 59)


def test_without_a_save_all_steps_are_lost() -> None:
    events = [at(0, "ranks"), at(2, "training", step=0), at(20, "failed")]
    result = compute_goodput([*events, at(21, "ranks"), at(22, "training", step=0), at(40, "done")])
    assert result.seconds["lost"] == 18
    assert result.seconds["training"] == 18


def test_a_clean_stop_loses_nothing_and_the_run_queues_again() -> None:
    result = compute_goodput(
        [
            at(0, "started"),
            at(0, "ranks"),
            at(1, "training", step=0),
            at(30, "saving", step=30, blocked=0.5),
            at(31, "stopped"),
            at(31, "queued"),
            at(91, "started"),
            at(92, "ranks"),
            at(93, "training", step=30),
            at(100, "done"),
        ]
    )
    assert result.seconds["queued"] == 60
    assert result.seconds["lost"] == pytest.approx(1.0)  # from the save to the end of the attempt
    assert result.total == 100


def test_a_requeued_job_was_queued_since_its_last_event() -> None:
    result = compute_goodput(
        [
            at(0, "started", job_start="7-0"),
            at(0, "ranks"),
            at(1, "training", step=0),
            at(30, "saving", step=30, blocked=0),
            at(31, "saved", step=30),  # then the node dies without another event
            at(91, "node", job_start="7-1"),  # what an agent says about its node is nothing that the run does
            at(91, "started", job_start="7-1"),
            at(92, "ranks"),
            at(93, "training", step=30),
            at(100, "stopped"),
            at(160, "started", job_start="7-2"),
            at(160, "started", job_start="7-2"),  # another agent
            at(161, "ranks"),
            at(162, "training", step=40),
            at(170, "done"),
        ]
    )
    assert result.seconds["queued"] == 120
    assert result.total == 170


def test_an_active_run_counts_until_now() -> None:
    result = compute_goodput([at(0, "started"), at(2, "training", step=0)], now=12)
    assert result.seconds["training"] == 10
    assert set(result.seconds) == set(SHARES)


def test_events_are_sorted_and_truncated_lines_skipped(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text(json.dumps(at(5, "training", step=0)) + '\n{"time": 6, "ev')
    (tmp_path / "agent-0.jsonl").write_text(json.dumps(at(1, "started")) + "\n" + json.dumps(at(9, "done")) + "\n")
    assert [event["event"] for event in read_events(tmp_path)] == ["started", "training", "done"]


def test_a_cancelled_run_has_trained_until_its_last_sign_of_life(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for file, time in ((folder.metrics, 90), (folder.slurm_log, 100), (folder.cancelled, 9000)):
        file.touch()
        os.utime(file, (time, time))
    trained = [at(0, "queued"), at(7, "started"), at(8, "ranks"), at(20, "training", step=0)]
    result = compute_goodput(trained, find_end(folder, trained))
    assert {name: result.seconds[name] for name in SHARES if result.seconds[name]} == {
        "queued": 7, "starting": 13, "training": 80,
    }  # fmt: skip
    assert find_end(folder, trained[:1]) == 9000, "it never started"
    ended = [*trained, at(50, "stopped"), at(60, "files", names=[])]
    assert find_end(folder, ended) is None
