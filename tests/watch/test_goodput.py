"""Goodput of timelines with known totals."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contract.run_folder import RunFolder
from paceline.watch.events import find_end, read_events
from paceline.watch.goodput import SHARES, compute_goodput, read_goodput


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
    assert (result.seconds["starting"], result.seconds["running"], result.seconds["idle"]) == (
        1,
        98,
        1,
    )
    # it has boundaries after all
    late = compute_goodput([*events, at(41, "training", step=0), at(100, "done")])
    assert (late.seconds["starting"], late.seconds["running"], late.seconds["training"]) == (
        11,
        29,
        59,
    )


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
    assert (result.seconds["idle"], result.seconds["lost"]) == (pytest.approx(1.0), 0), (
        "it has saved, and shuts down"
    )
    assert result.total == 100


def test_a_requeued_job_was_queued_since_its_last_event() -> None:
    result = compute_goodput(
        [
            at(0, "started", job_start="7-0"),
            at(0, "ranks"),
            at(1, "training", step=0),
            at(30, "saving", step=30, blocked=0),
            at(31, "saved", step=30),  # then the node dies without another event
            # what an agent says about its node is nothing that the run does
            at(91, "node", job_start="7-1"),
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


def test_a_dead_node_is_lost_until_slurm_requeues_the_job() -> None:
    """Its job goes back into the queue only when Slurm notices, minutes later."""
    events = [
        at(0, "node", job_start="7-0", index=0),
        at(1, "launch", attempt=1, ranks=[0]),
        at(2, "training", step=0),
        at(30, "saving", step=30, blocked=0.0),
        at(40, "progress", step=39),
    ]
    later = [at(101, "launch", attempt=2, ranks=[0]), at(102, "training", step=30), at(110, "done")]
    for queued_at, lost in ((80.0, 50), (5.0, 10), (500.0, 70)):  # Slurm's clock may be another one
        again = at(100, "node", job_start="7-1", index=0, queued_at=queued_at)
        result = compute_goodput([*events, again, *later])
        assert (result.seconds["lost"], result.seconds["queued"], result.seconds["training"]) == (
            lost,
            70 - lost,
            36,
        )
        assert (result.failures, result.total) == (1, 110)
    stopped = [
        *events,
        at(40, "stopped", attempt=1),
        at(100, "node", job_start="7-1", index=0, queued_at=80.0),
    ]
    result = compute_goodput([*stopped, at(101, "launch", attempt=2, ranks=[0]), at(110, "done")])
    assert (result.seconds["idle"], result.seconds["queued"], result.seconds["lost"]) == (40, 20, 0)


def test_the_end_of_processes_is_idle() -> None:
    begin = [
        at(0, "launch", attempt=1, ranks=[0]),
        at(2, "training", step=0),
        at(30, "saving", step=30, blocked=1.0),
    ]
    result = compute_goodput([*begin, at(30, "session_end", step=30), at(35, "done", attempt=1)])
    assert (result.seconds["training"], result.seconds["saving"], result.seconds["idle"]) == (
        27,
        1,
        5,
    )
    again = [
        at(36, "launch", attempt=2, ranks=[0]),
        at(40, "training", step=30),
        at(50, "done", attempt=2),
    ]
    failed = compute_goodput(
        [*begin, at(31, "session_end", step=30), at(35, "failed", attempt=1), *again]
    )
    assert (failed.seconds["lost"], failed.seconds["idle"], failed.failures) == (1, 5, 1)
    assert failed.total == 50


def test_a_script_may_train_in_several_sessions() -> None:
    """The folds of a cross validation: each has steps and checkpoints of its own, and starts at step 0."""
    first = [
        at(0, "launch", attempt=1, ranks=[0]),
        at(10, "training", step=0, seconds={"setup": 5.0}),
        at(12, "first_step", step=1, seconds={"setup": 5.0, "first_step": 2.0}),
        at(40, "saving", step=20, blocked=0.0),
        at(50, "session_end", step=30),
    ]
    second = [
        at(55, "training", step=0, seconds={"setup": 2.0}),
        at(57, "first_step", step=1, seconds={"setup": 2.0}),
    ]

    def seconds(*events: dict[str, Any], now: float | None = None) -> dict[str, float]:
        result = compute_goodput(events, now)
        assert result.total == (now or events[-1]["time"])
        return {name: each for name, each in result.seconds.items() if each}

    assert seconds(*first, now=53.0)["idle"] == 3, "nobody knows that another session follows"
    live = seconds(*first, *second, now=90.0)
    assert live == {"starting": pytest.approx(16, abs=2), "training": pytest.approx(74, abs=2)}
    ended = [
        at(90, "saving", step=25, blocked=0.0),
        at(100, "session_end", step=30),
        at(101, "done", attempt=1),
    ]
    done = seconds(*first, *second, *ended)
    assert done == {
        "starting": pytest.approx(16, abs=2),
        "training": pytest.approx(84, abs=2),
        "idle": 1,
    }
    # The second session fails after its save. The next attempt finds nothing to do in the first one, or skips it.
    failed = [*ended[:1], at(96, "failed", attempt=1), at(97, "launch", attempt=2, ranks=[0])]
    over = [at(98, "training", step=30), at(98, "session_end", step=30)]
    for skipped in ([], over):
        again = seconds(
            *first,
            *second,
            *failed,
            *skipped,
            at(98, "training", step=25),
            at(120, "done", attempt=2),
        )
        assert (again["lost"], again["idle"]) == (6, 1)


def test_a_requeued_job_waits_until_its_head_agent_arrives() -> None:
    result = compute_goodput(
        [
            at(0, "node", job_start="7-0", index=0),
            at(1, "launch", attempt=1, ranks=[0]),
            at(2, "training", step=0),
            at(30, "saving", step=30, blocked=0.0),
            at(30, "stopped", attempt=1),
            at(89, "node", job_start="7-1", index=1),
            at(89.5, "unreachable", job_start="7-1", host="n2"),
            at(90, "node", job_start="7-1", index=0),
            at(91, "launch", attempt=2, ranks=[0]),
            at(92, "training", step=30),
            at(100, "done"),
        ]
    )
    assert (result.seconds["queued"], result.seconds["idle"]) == (60, 0)
    assert [(start.name, start.began, start.ended) for start in result.job_starts] == [
        ("7-0", 0, 30),
        ("7-1", 90, 100),
    ]


def training_run(folder: RunFolder, last_output: float) -> list[dict[str, Any]]:
    folder.attempt(1).path.mkdir()
    folder.attempt(1).log(0).write_text("a line\n")
    os.utime(folder.attempt(1).log(0), (last_output, last_output))
    return [
        at(0, "node", job_start="7-0", index=0),
        at(1, "launch", attempt=1, ranks=[0]),
        at(2, "training", step=0),
        at(30, "saving", step=30, blocked=0.0),
    ]


@pytest.mark.parametrize(
    "ahead", [[], [at(90, "node", job_start="7-1", index=1)]], ids=["pending", "agents arrive"]
)
def test_a_run_that_went_back_into_the_queue_waits_there(
    ahead: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 100.0)
    events = [*training_run(RunFolder(tmp_path), 31), at(32, "stopped", attempt=1), *ahead]
    assert read_goodput(RunFolder(tmp_path), events, is_over=False).seconds["idle"] == 68
    result = read_goodput(RunFolder(tmp_path), events, is_over=False, is_waiting=True)
    assert (result.seconds["queued"], result.seconds["idle"], result.failures) == (68, 0, 0)
    assert result.job_starts[-1].ended == 32
    over = read_goodput(RunFolder(tmp_path), events, is_over=True)
    assert over.seconds["queued"] == 0, "nobody requeues a job that was cancelled"
    later = [
        *events,
        at(90, "node", job_start="7-1", index=0),
        at(95, "launch", attempt=2, ranks=[0]),
    ]
    assert read_goodput(RunFolder(tmp_path), later, is_over=False).seconds["starting"] == 12


def test_a_job_that_slurm_has_requeued_waits_since_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 100.0)
    events = training_run(RunFolder(tmp_path), 40)
    assert read_goodput(RunFolder(tmp_path), events, is_over=False).seconds["queued"] == 0
    result = read_goodput(RunFolder(tmp_path), events, is_over=False, is_waiting=True)
    assert (result.seconds["queued"], result.seconds["training"], result.failures) == (60, 38, 1)
    arrived = [*events, at(90, "node", job_start="7-1", index=0)]
    result = read_goodput(RunFolder(tmp_path), arrived, is_over=False)
    assert (result.seconds["queued"], result.seconds["starting"]) == (50, 12), (
        "before its ranks start again, too"
    )


def test_a_job_that_waits_for_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 100.0)
    result = read_goodput(RunFolder(tmp_path), [at(20, "queued")], is_over=False, is_waiting=True)
    assert result.seconds["queued"] == result.total == 80


def test_an_active_run_counts_until_now() -> None:
    result = compute_goodput([at(0, "started"), at(2, "training", step=0)], now=12)
    assert result.seconds["training"] == 10
    assert set(result.seconds) == set(SHARES)


def test_events_are_sorted_and_truncated_lines_skipped(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text(
        json.dumps(at(5, "training", step=0)) + '\n{"time": 6, "ev'
    )
    (tmp_path / "agent-0.jsonl").write_text(
        json.dumps(at(1, "started")) + "\n" + json.dumps(at(9, "done")) + "\n"
    )
    assert [event["event"] for event in read_events(tmp_path)] == ["started", "training", "done"]


def test_a_cancelled_run_has_trained_until_its_last_sign_of_life(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for file, time in ((folder.metrics, 90), (folder.slurm_log, 100), (folder.cancelled, 9000)):
        file.touch()
        os.utime(file, (time, time))
    trained = [at(0, "queued"), at(7, "started"), at(8, "ranks"), at(20, "training", step=0)]
    result = compute_goodput(trained, find_end(folder, trained))
    assert {name: result.seconds[name] for name in SHARES if result.seconds[name]} == {
        "queued": 7,
        "starting": 13,
        "training": 80,
    }
    assert find_end(folder, trained[:1]) == 9000, "it never started"
    ended = [*trained, at(50, "stopped"), at(60, "files", names=[])]
    assert find_end(folder, ended) is None


def test_a_start_that_goes_on_is_not_divided() -> None:
    """Rank 0 says at its first step boundary what the start consisted of: until then, it may all be imports."""
    events = [at(0, "node", job_start="7-0", index=0), at(2, "launch", attempt=1, ranks=[0])]
    starting = compute_goodput(events, now=10)
    assert starting.seconds["starting"] == 10
    assert {name: each for name, each in starting.parts["starting"].items() if each} == {
        "agents": 2,
        "unmeasured": 8,
    }
    started = compute_goodput([*events, at(12, "training", step=0, seconds={"setup": 1.0})], now=12)
    assert {name: each for name, each in started.parts["starting"].items() if each} == {
        "agents": 2,
        "import": 9,
        "setup": 1,
    }


def test_a_start_is_divided_by_what_agents_and_rank_0_have_measured() -> None:
    phases = {"device": 0.5, "rendezvous": 0.5, "process_group": 1.0, "restore": 4.0, "setup": 3.0}
    result = compute_goodput(
        [
            at(0, "queued"),
            at(10, "node", job_start="7-0", index=0, nodelist="n[1-2]"),
            at(9, "node", job_start="7-0", index=1),  # its clock is behind
            at(12, "started", job_start="7-0", index=0),
            at(13, "staging"),
            at(18, "staged", seconds=5.0),
            at(20, "launch", attempt=1, ranks=[0, 1]),
            at(24, "ranks", attempt=1, ranks=[0, 1], uses_runtime=True),
            at(22, "ranks", attempt=1, ranks=[2, 3], uses_runtime=True),
            at(35, "training", step=10, seconds=phases),
            at(
                48,
                "first_step",
                step=11,
                seconds={**phases, "first_batch": 2.0, "first_step": 11.0},
            ),
            at(108, "saving", step=40, blocked=2.0, waited=32.0),
            at(168, "done", step=70, waited=62.0),
        ]
    )
    assert result.parts["starting"] == pytest.approx(
        {
            "agents": 5,
            "staging": 5,
            "import": 6,
            "rendezvous": 2,
            "restore": 4,
            "setup": 3,
            "first_batch": 2,
            "compile": 9,  # 11 s, where others take 2 s
            "unmeasured": 0,
        }
    )
    assert result.seconds["queued"] == 10
    assert result.seconds["starting"] == pytest.approx(sum(result.parts["starting"].values()))
    assert result.seconds["saving"] == 2
    # From 2 s before the end of the first step on; rank 0 waited for half of the time.
    assert result.parts["training"] == pytest.approx({"compute": 60, "data": 60})
    assert (result.attempts, result.failures, result.seconds_between_failures) == (1, 0, None)
    assert [(start.name, start.nodes, start.began, start.ended) for start in result.job_starts] == [
        ("7-0", "n[1-2]", 10, 168)
    ]
    assert {span.attempt for span in result.timeline if span.kind != "queued"} == {1}


def test_failures_are_counted_also_without_an_event_at_the_end() -> None:
    result = compute_goodput(
        [
            at(0, "node", job_start="7-0", index=0),
            at(1, "ranks", attempt=1, ranks=[0]),
            at(2, "training", step=0),
            at(10, "failed", attempt=1),
            at(10, "failed", reason="lost the head agent"),  # another agent
            at(11, "ranks", attempt=2, ranks=[0]),
            at(12, "training", step=0),  # the node dies
            at(50, "node", job_start="7-1", index=0),
            at(51, "ranks", attempt=3, ranks=[0]),
            at(52, "training", step=0),
            at(62, "done"),
        ]
    )
    assert (result.attempts, result.failures) == (3, 2)
    assert result.seconds_between_failures == (10 + 1 + 12) / 2
    assert result.seconds["queued"] == 38


def test_time_in_which_nobody_had_resumed_the_run_does_not_count() -> None:
    events = [
        at(0, "queued"),
        at(5, "ranks"),
        at(6, "training", step=0),
        at(16, "stopped"),
        at(9000, "queued"),
        at(9004, "ranks"),
        at(9005, "training", step=0),
        at(9010, "done"),
    ]
    result = compute_goodput(events)
    assert result.total == 16 + 10
    local = [
        at(0, "node", job_start="pid-1-a"),
        at(5, "stopped"),
        at(900, "node", job_start="pid-2-b"),
        at(903, "done"),
    ]
    assert compute_goodput(local).total == 8


def test_a_time_line_stays_small() -> None:
    saves = [at(2 + step, "saving", step=step, blocked=0.1) for step in range(1, 5000)]
    result = compute_goodput([at(0, "ranks"), at(1, "training", step=0), *saves, at(6000, "done")])
    assert len(result.timeline) < 10
    assert result.seconds["saving"] == pytest.approx(499.9)
    assert sum(span.seconds for span in result.timeline) == pytest.approx(result.total)


EVENTS = st.sampled_from(
    [
        "queued",
        "node",
        "started",
        "staging",
        "staged",
        "launch",
        "ranks",
        "training",
        "first_step",
        "saving",
        "progress",
        "saved",
        "failed",
        "stopped",
        "done",
        "restarted",
        "files",
        "requeued",
        "unreachable",
        "session_end",
    ]
)
SECONDS = st.floats(0, 1000)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 50),
        "blocked": SECONDS,
        "waited": SECONDS,
        "attempt": st.integers(0, 4),
        "index": st.integers(0, 1),
        "job_start": st.sampled_from(["7-0", "7-1", "pid-1-a", "pid-2-b"]),
        "ranks": st.sampled_from([[0, 1], [2, 3]]),
        "uses_runtime": st.booleans(),
        "seconds": st.dictionaries(
            st.sampled_from(["device", "setup", "first_batch", "first_step"]), SECONDS
        ),
    },
)


@given(
    moments=st.lists(st.tuples(SECONDS, EVENTS, FIELDS), min_size=1, max_size=30),
    now=st.none() | st.floats(0, 2000),
)
@settings(max_examples=300, deadline=None)
def test_parts_always_sum_to_the_wall_time(
    moments: list[tuple[float, str, dict[str, Any]]], now: float | None
) -> None:
    moments.sort(key=lambda moment: moment[0])
    events = [at(time, name, **fields) for time, name, fields in moments]
    result = compute_goodput(events, now)
    spans = result.timeline
    assert all(span.began < span.ended for span in spans)
    assert all(left.ended <= right.began for left, right in pairwise(spans))
    assert result.total == pytest.approx(sum(span.seconds for span in spans))
    assert (
        min(
            [
                *result.seconds.values(),
                *(each for parts in result.parts.values() for each in parts.values()),
            ]
        )
        >= 0
    )
    for name, parts in result.parts.items():
        assert sum(parts.values()) == pytest.approx(result.seconds[name], abs=1e-6)
    # Without spans are only the times before the run began, after it was done, and until somebody resumed it.
    starts = {"queued", "node", "started", "launch", "ranks", "training"}
    resumed = [event["time"] for event in events if event["event"] in starts]
    gaps = [right.began for left, right in pairwise(spans) if left.ended < right.began]
    assert set(gaps) <= set(resumed)
    if (
        spans
        and now is not None
        and now > events[-1]["time"]
        and events[-1]["event"] not in ("done", "queued")
    ):
        over = any(event["event"] == "done" for event in events)
        assert over or spans[-1].ended == now


def test_an_attempt_that_was_killed_with_its_node_has_run_until_its_last_output(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    for number, last in ((1, 80), (2, 9000)):
        folder.attempt(number).path.mkdir()
        folder.attempt(number).log(0).write_text("a line\n")
        os.utime(folder.attempt(number).log(0), (last, last))
    events = [
        at(0, "node", job_start="7-0", index=0),
        at(1, "launch", attempt=1, ranks=[0]),
        at(2, "training", step=0),
        at(30, "saving", step=30, blocked=0.0),
        at(200, "node", job_start="7-1", index=0),
        at(201, "launch", attempt=2, ranks=[0]),
        at(202, "training", step=30),
        at(300, "done", attempt=2),
    ]
    result = read_goodput(folder, events, is_over=True)
    assert {name: seconds for name, seconds in result.seconds.items() if seconds} == {
        "queued": 120,
        "starting": 4,
        "training": 126,
        "lost": 50,
    }
    assert result.failures == 1


def test_a_live_run_tells_by_its_samples_how_it_spends_its_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.system.mkdir()
    row = [0, 2, 101, 0.1, "R", 0.5, 20.0, 0.4]
    folder.node_metrics(0).write_text(json.dumps({"time": 160, "ranks": [row]}) + "\n")
    events = [
        at(0, "launch", attempt=1, ranks=[0]),
        at(50, "training", step=0, seconds={"setup": 10.0}),
        at(60, "first_step", step=1, seconds={"setup": 10.0, "first_step": 10.0}),
    ]
    result = read_goodput(folder, events, is_over=False)
    assert result.parts["starting"]["compile"] == 9.0, "100 steps have taken 100 s"
    share = result.parts["training"]["data"] / result.seconds["training"]
    assert share == pytest.approx(0.2, abs=0.01)


def test_a_first_step_that_has_not_ended_counts_as_a_start() -> None:
    started = [
        at(0, "launch", attempt=1, ranks=[0]),
        at(50, "training", step=7, seconds={"setup": 10.0}),
    ]
    sample = at(110, "progress", step=7, waited=0.0)

    def starting(*events: Any, now: float) -> tuple[float, float, float]:
        result = compute_goodput([*started, *events], now)
        assert result.seconds["starting"] + result.seconds["training"] == now
        parts = result.parts["starting"]
        return parts["first_batch"], parts["compile"], result.seconds["training"]

    batch = at(60, "first_batch", step=7)
    assert starting(now=55.0) == (5, 0, 0)
    assert starting(batch, sample, now=120.0) == (10, 60, 0)
    ended = at(
        150, "first_step", step=8, seconds={"setup": 10.0, "first_batch": 10.0, "first_step": 90.0}
    )
    assert starting(batch, sample, ended, now=151.0) == (10, 89, 2)  # the second step runs for 1 s
    assert starting(batch, ended, at(170, "progress", step=18, waited=0.0), now=170.0) == (
        10,
        88,
        22,
    )
    failed = compute_goodput([*started, batch, at(90, "failed", step=7)])
    assert (failed.seconds["starting"], failed.seconds["lost"], failed.seconds["training"]) == (
        90,
        0,
        0,
    )
    left = compute_goodput([*started, batch, at(80, "session_end"), at(90, "done")])
    assert (left.seconds["starting"], left.seconds["training"], left.seconds["idle"]) == (
        50,
        30,
        10,
    )
    # Without the loop of `run.steps`, nobody tells when the first step ends.
    by_hand = compute_goodput(
        [at(0, "launch", attempt=1, ranks=[0]), at(50, "training", step=0)], 80.0
    )
    assert by_hand.seconds["training"] == 30
