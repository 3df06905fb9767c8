"""The line of `paceline show` about a start."""

from __future__ import annotations

from typing import Any

from paceline.watch.events import describe_start_phases


def first_step(time: float, **seconds: Any) -> dict[str, Any]:
    return {"event": "first_step", "time": time, "step": 1, "seconds": seconds}


def test_the_newest_start_is_described_with_what_came_before_the_session() -> None:
    events = [
        {"event": "ranks", "time": 100.0},
        first_step(
            109.0, device=0.5, process_group=1.0, setup=2.0, first_batch=0.01, first_step=4.0
        ),
        {"event": "ranks", "time": 200.0},
        first_step(
            206.0,
            device=0.25,
            context=0.1,
            context_in_all=0.4,
            process_group=0.65,
            setup=1.0,
            first_batch=0.0,
            first_step=2.0,
        ),
    ]
    expected = (
        "6.0 s to the end of the first step: import 2.0, device 0.2, CUDA context 0.1, process group 0.7, set-up 1.0, "
        "first step 2.0"
    )
    assert describe_start_phases(events) == expected


def test_a_start_begins_when_its_head_agent_arrives() -> None:
    events = [
        {"event": "node", "time": 90.0, "index": 1},
        {"event": "node", "time": 100.0, "index": 0},
        {"event": "started", "time": 102.0, "index": 0, "ranks": [0, 1]},
        {"event": "launch", "time": 103.0, "ranks": [0, 1]},
        {"event": "ranks", "time": 110.0, "ranks": [0, 1]},
        first_step(115.0, setup=2.0, first_step=1.0),
    ]
    assert describe_start_phases(events) == (
        "15.0 s to the end of the first step: agents 3.0, import 9.0, set-up 2.0, first step 1.0"
    )
    restart = [
        {"event": "failed", "time": 120.0},
        {"event": "launch", "time": 130.0},
        first_step(135.0, setup=2.0),
    ]
    assert describe_start_phases([*events, *restart]).startswith(
        "5.0 s to the end of the first step: import 3.0"
    )


def test_without_an_agent_or_with_damaged_events_there_is_less_to_say() -> None:
    assert describe_start_phases([]) == ""
    assert (
        describe_start_phases(
            [{"event": "ranks", "time": 1.0}, {"event": "first_step", "time": 2.0}]
        )
        == ""
    )
    assert describe_start_phases([first_step(9.0, setup=1.5, first_step="?")]) == (
        "1.5 s to the end of the first step: set-up 1.5"
    )
