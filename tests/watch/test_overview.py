"""The row of a run: its progress, the time that is left, its newest numbers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.commands.ps import make_columns
from paceline.contract.run_folder import RunFolder
from paceline.slurm.job_states import JobState
from paceline.watch.metrics import Curves, read_latest
from paceline.watch.overview import find_attempt, make_overview
from paceline.watch.records import Record


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_record(folder: RunFolder, status: str) -> Record:
    return Record(folder, {}, status, None, None)


def metrics(count: int, *, pace: float = 2.0) -> list[dict[str, Any]]:
    """The lines of a run that logs every tenth step, the last one now."""
    now = time.time()
    return [
        {"step": 10 * n, "time": now - (count - n) * 10 * pace, "loss": 1 / n}
        for n in range(1, count + 1)
    ]


def test_the_time_left_follows_from_the_recent_pace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_lines(folder.metrics, metrics(20))
    write_lines(
        folder.rank_events,
        [
            {"time": 1.0, "event": "training", "step": 0},
            {"time": 1.0, "event": "total_steps", "steps": 1200},
        ],
    )
    row = make_overview(make_record(folder, "running"))
    assert (row.step, row.total_steps, row.loss) == (200, 1200, 0.05)
    assert row.seconds_left == pytest.approx(2000, abs=60)
    over = make_overview(make_record(folder, "done"))
    assert (over.total_steps, over.seconds_left) == (1200, None)
    json.dumps([row.to_json(), over.to_json()], allow_nan=False)


def test_a_run_that_hangs_does_not_count_down(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = metrics(20)
    for line in lines:
        line["time"] -= 3600
    write_lines(folder.metrics, lines)
    write_lines(folder.rank_events, [{"time": 1.0, "event": "total_steps", "steps": 12_000}])
    row = make_overview(make_record(folder, "running"))
    assert (row.total_steps, row.seconds_left) == (12_000, None)
    assert row.detail.endswith("no step for 1h")
    folder.attempt(1).path.mkdir()
    folder.attempt(1).log(0).write_text(
        "..."
    )  # it prints: it evaluates, and nobody knows for how long
    row = make_overview(make_record(folder, "running"))
    assert ("no step" in row.detail, row.seconds_left) == (False, None)
    os.utime(folder.attempt(1).log(0), (1.0, 1.0))
    assert "no step" in make_overview(make_record(folder, "running")).detail


@pytest.mark.parametrize(("age", "pause"), [(2.0, ""), (90.0, "no step for 95 s")])
def test_the_agent_knows_steps_that_are_not_logged_yet(
    tmp_path: Path, age: float, pause: str
) -> None:
    folder = RunFolder(tmp_path)
    lines = metrics(2)
    for line in lines:
        line["time"] -= 3600
    write_lines(folder.metrics, lines)
    rows = [[0, 2, 25, age, "S", 0.01, 0.0, 0.0]]
    write_lines(
        folder.node_metrics(0),
        [{"host": "node1", "time": 1.0}, {"time": time.time() - 5, "ranks": rows}],
    )
    row = make_overview(make_record(folder, "running"))
    assert row.step == 25
    assert row.detail == pause
    assert make_overview(make_record(folder, "failed")).detail == ""


def samples(*, step: int, age: float) -> list[dict[str, Any]]:
    """What the agent of rank 0 saw a moment before."""
    rows = [[0, 2, step, age, "S", 0.5, 0.0, 0.0]]
    return [{"host": "node1", "time": 1.0}, {"time": time.time() - 1.0, "ranks": rows}]


def restart(
    *, before: float, trains: bool, step: int = 100, total: int = 800, lines: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines and events of a run that got to step 109, waited for half an hour, and started again."""
    now = time.time()
    old = [{"step": 50 + n, "time": now - 2000 + n, "loss": 1.0} for n in range(60)]
    new = [
        {"step": step + 1 + n, "time": now - (lines - n) * 0.5, "loss": 1.0} for n in range(lines)
    ]
    events: list[dict[str, Any]] = [
        {"time": now - 2100, "event": "training", "step": 0},
        {"time": now - 2100, "event": "total_steps", "steps": total},
        {"time": now - before, "event": "node", "index": 0},
        {"time": now - before, "event": "launch", "ranks": [0]},
    ]
    if trains:
        events.append({"time": now - before + 1, "event": "training", "step": step})
        events.append({"time": now - before + 1, "event": "total_steps", "steps": total})
    return [*old, *new], events


@pytest.mark.parametrize("started", [20.0, 1000.0])
def test_nobody_knows_the_time_left_while_a_run_starts_again(
    tmp_path: Path, started: float
) -> None:
    folder = RunFolder(tmp_path)
    lines, events = restart(before=started, trains=False)
    write_lines(folder.metrics, lines)
    write_lines(folder.rank_events, events)
    row = make_overview(make_record(folder, "running"))
    assert (row.step, row.seconds_left, row.detail) == (109, None, "")


def test_a_run_that_goes_on_has_the_step_and_the_pace_of_its_newest_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines, events = restart(before=2.0, trains=True)
    write_lines(folder.metrics, lines)
    write_lines(folder.rank_events, events)
    row = make_overview(make_record(folder, "running"))
    assert (row.step, row.seconds_left, row.detail) == (100, None, "")
    write_lines(folder.metrics, restart(before=30.0, trains=True, lines=20)[0])
    write_lines(folder.rank_events, restart(before=30.0, trains=True)[1])
    row = make_overview(make_record(folder, "running"))
    assert (row.step, row.seconds_left) == (120, pytest.approx(680 * 0.5, abs=2)), (
        "half an hour is not part of it"
    )


def test_an_evaluation_has_no_time_left(tmp_path: Path) -> None:
    """Its last steps may not even be logged: only the agent has seen them."""
    folder = RunFolder(tmp_path)
    lines, events = restart(before=90.0, trains=True, step=0, total=60, lines=11)
    write_lines(folder.metrics, [line | {"time": line["time"] - 24.0} for line in lines[60:]])
    write_lines(folder.rank_events, events)
    write_lines(folder.node_metrics(0), samples(step=20, age=20.0))
    row = make_overview(make_record(folder, "running"))
    assert (row.step, row.seconds_left, row.detail) == (20, None, "")
    write_lines(folder.node_metrics(0), samples(step=20, age=0.5))
    assert make_overview(make_record(folder, "running")).seconds_left == pytest.approx(20.0, abs=1)
    write_lines(folder.node_metrics(0), [])
    assert make_overview(make_record(folder, "running")).seconds_left == pytest.approx(
        24.0, abs=1
    ), "it may log late"
    write_lines(folder.metrics, [line | {"time": line["time"] - 40.0} for line in lines[60:]])
    assert make_overview(make_record(folder, "running")).seconds_left is None


def test_a_run_that_waits_in_the_queue_has_no_speed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_lines(folder.metrics, [{"step": 1, "time": time.time(), "seconds": 0.5}])
    running = make_record(folder, "running")
    assert (make_overview(running).rate, make_overview(running).rate_unit) == (2.0, "steps/s")
    queued = make_overview(
        replace(running, status="queued", job="7", state=JobState("7", "PENDING"))
    )
    assert (queued.rate, queued.rate_unit, queued.step) == (None, "", 1)


def test_a_run_has_no_goodput_before_it_has_started(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    now = time.time()
    waits = {"job": "7", "state": JobState("7", "PENDING")}
    submitted = [{"time": now - 100, "event": "queued"}]
    write_lines(folder.rank_events, submitted)
    queued = replace(make_record(folder, "queued"), **waits)
    assert make_overview(queued).goodput is None
    assert make_overview(make_record(folder, "cancelled")).goodput is None
    write_lines(folder.rank_events, [*submitted, {"time": now - 50, "event": "node", "index": 0}])
    assert make_overview(make_record(folder, "running")).goodput == 0.0


def test_a_run_without_a_known_end_has_no_time_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_lines(folder.metrics, metrics(20))
    row = make_overview(make_record(folder, "running"))
    assert (row.step, row.total_steps, row.seconds_left) == (200, None, None)


def test_the_newest_attempt_tells_the_total() -> None:
    training: dict[str, Any] = {"event": "training", "time": 1.0}
    first = [training, {"event": "total_steps", "steps": 10}]
    assert find_attempt(first).total_steps == 10
    assert find_attempt([*first, training]).total_steps is None
    assert find_attempt([*first, {"event": "total_steps"}]).total_steps is None
    last = {"event": "total_steps", "steps": 7}
    assert find_attempt([*first, training, last]).total_steps == 7


def test_a_night_in_the_queue_is_not_part_of_the_pace(tmp_path: Path) -> None:
    before, after = metrics(10), metrics(10)
    for line in before:
        line["time"] -= 40_000
    for line in after:
        line["step"] += 100
    write_lines(tmp_path / "metrics.jsonl", before + after)
    assert read_latest(tmp_path / "metrics.jsonl").since(0.0).pace == pytest.approx(2.0)


def test_steps_that_are_repeated_after_a_restart_are_not_part_of_the_pace(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metrics(10) + metrics(6))
    latest = read_latest(tmp_path / "metrics.jsonl")
    assert (latest.step, latest.since(0.0).pace) == (60, pytest.approx(2.0))


def test_a_run_that_ended_with_evaluations_keeps_its_loss(tmp_path: Path) -> None:
    evaluations = [{"step": 200, "time": time.time(), "accuracy": 0.1 * n} for n in range(8)]
    write_lines(tmp_path / "metrics.jsonl", metrics(20) + evaluations)
    latest = read_latest(tmp_path / "metrics.jsonl", with_pace=False)
    assert (latest.step, latest.loss, latest.since(0.0).pace) == (200, 0.05, None)


def test_numbers_that_are_none_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        'cut off", "loss": 3}\n{"step": true, "time": NaN, "loss": Infinity}\n'
        '{"step": 3, "time": "x", "loss": "nan", "seconds": 0.5}\n[]\n{"step": 4'
    )
    latest = read_latest(path)
    assert (latest.step, latest.time, latest.loss, latest.loss_name) == (3, None, None, "loss")
    assert (latest.rate, latest.rate_unit) == (2.0, "steps/s")
    assert read_latest(tmp_path / "missing").step is None


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0.0, "time": -2}, {"step": 1e-320, "time": -1}],
        [{"step": 0, "time": -1e308}, {"step": 1, "time": 1e308}],
        [{"step": 3, "time": -1, "seconds": 1e308}],
        [{"step": 3, "time": -1, "seconds": 1e-320}],
        [
            {"step": 3, "time": -2},
            {"step": -(10**299), "time": -1.5},
            {"step": 2 - 10**299, "time": -1},
        ],
    ],
)
def test_metrics_of_somebody_else_cannot_break_a_list(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    folder, now = RunFolder(tmp_path), time.time()
    write_lines(
        folder.rank_events, [{"time": now - 10, "event": "training", "step": 0, "steps": 1000}]
    )
    write_lines(folder.metrics, [{**line, "time": now + line["time"], "loss": 1} for line in lines])
    row = make_overview(make_record(folder, "running"))
    assert (row.total_steps, round(row.seconds_left or 0.0), row.loss) == (1000, 0, 1)
    json.dumps(row.to_json(), allow_nan=False)
    assert make_columns([row])


def test_the_numbers_of_one_rank_are_not_those_of_the_run(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "time": 1.0, "loss": 4.0, "samples_per_second": 300.0},
        {"step": 2, "time": 2.0, "of": "rank 0", "loss": 9.0},
        {"step": 3, "time": 3.0, "of": "rank 0", "loss": 9.0},
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    for with_pace in (True, False):
        latest = read_latest(tmp_path / "metrics.jsonl", with_pace=with_pace)
        assert (latest.step, latest.time, latest.loss, latest.rate) == (3, 3.0, 4.0, 300.0)
    curves = Curves()
    curves.add(lines)
    assert [(curve.name, curve.values) for curve in curves.all()] == [
        ("loss", [4.0]),
        ("samples_per_second", [300.0]),
    ]


def test_a_run_that_is_over_keeps_its_speed(tmp_path: Path) -> None:
    """Its last lines may have none, such as those of an evaluation."""
    lines = [{"step": 1, "time": 1.0, "loss": 4.0, "samples_per_second": 148.0}]
    write_lines(
        tmp_path / "metrics.jsonl",
        [*lines, *({"step": n, "time": 2.0, "loss": 4.0} for n in (2, 3, 4))],
    )
    latest = read_latest(tmp_path / "metrics.jsonl", with_pace=False)
    assert (latest.rate, latest.rate_unit) == (148.0, "samples/s")


def test_a_run_tells_how_far_it_is_while_slurm_does_not_answer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_lines(folder.metrics, metrics(20))
    write_lines(folder.rank_events, [{"time": 1.0, "event": "total_steps", "steps": 1200}])
    row = make_overview(make_record(folder, "unknown"))
    assert (row.step, row.seconds_left) == (200, pytest.approx(2000, abs=60))
    write_lines(folder.metrics, [line | {"time": line["time"] - 3600} for line in metrics(20)])
    row = make_overview(make_record(folder, "unknown"))
    assert (row.step, row.seconds_left, row.detail) == (200, None, "")
