"""The retry policy, as a table of histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.agent.retry_policy import (
    CRASH,
    ERROR,
    HANG,
    KILLED,
    LINGERED,
    LOST,
    MAX_EXCLUSIONS,
    PREFLIGHT,
    AttemptSummary,
    decide,
    may_requeue,
    read_history,
    write_summary,
)
from paceline.contract.run_folder import RunFolder


def ended(cause: str, step: int | None = None, **more: Any) -> AttemptSummary:
    return AttemptSummary(number=1, cause=cause, step=step, **more)


def diverged(step: int | None, **more: Any) -> AttemptSummary:
    return ended(ERROR, step, error="ValueError: diverged", **more)


# history, max_restarts -> restart?, part of the reason
TABLE: dict[str, tuple[list[AttemptSummary], int, bool, str]] = {
    "no restarts requested": ([ended(KILLED, 5)], 0, False, "requested"),
    "an error after some steps": (
        [diverged(5)],
        1,
        True,
        "from the beginning: no checkpoint yet (1 of 1)",
    ),
    "an error after a save": ([diverged(5, saved=4)], 1, True, "restarting from step 4 (free"),
    "the same error at the same step": ([diverged(5), diverged(5)], 9, False, "twice"),
    "the same, with another failure between": (
        [diverged(5), ended(KILLED, 3), diverged(5)],
        9,
        False,
        "twice",
    ),
    "the same error at another step": ([diverged(5), diverged(8)], 9, True, "2 of 9"),
    "another error at the same step": (
        [diverged(5), ended(ERROR, 5, error="KeyError: x")],
        9,
        True,
        "2 of 9",
    ),
    "the same, though the checkpoint advanced": (
        [diverged(5, saved=4), diverged(5, resumed_from=4, saved=4)],
        9,
        False,
        "twice",
    ),
    "before the first step": ([diverged(None)], 9, False, "first step"),
    "a crash before the first step": (
        [ended(CRASH, None, error="SIGSEGV")],
        9,
        False,
        "first step",
    ),
    "resumed, then failed before its first step": (
        [diverged(None, resumed_from=40, saved=40)],
        9,
        False,
        "first step",
    ),
    "killed from outside before the first step": ([ended(KILLED, None)], 9, True, "1 of 9"),
    "again killed before the first step": (
        [ended(KILLED, None), ended(KILLED, None)],
        9,
        False,
        "twice",
    ),
    "some ranks had finished": ([ended(LINGERED, 5)], 9, False, "already finished"),
    "used up": ([ended(KILLED, 1), ended(KILLED, 2), ended(KILLED, 3)], 2, False, "used up"),
    "progress is free": (
        [ended(KILLED, 9 * n, resumed_from=9 * n - 9, saved=9 * n) for n in range(1, 20)],
        1,
        True,
        "free",
    ),
    "progress, then none": (
        [ended(KILLED, 5, saved=4), ended(HANG, 6, resumed_from=4, saved=4)],
        1,
        True,
        "1 of 1",
    ),
    "no runtime in the script: only the count matters": (
        [diverged(None, uses_runtime=False)] * 2,
        2,
        True,
        "from the script's own checkpoint, if any (2 of 2)",
    ),
    "no runtime, used up": ([diverged(None, uses_runtime=False)] * 3, 2, False, "used up"),
    "another job start's failures are not counted here": (
        [
            ended(KILLED, 1, job_start="7-0"),
            ended(KILLED, 2, job_start="7-0"),
            ended(KILLED, 3, job_start="7-1"),
        ],
        1,
        True,
        "1 of 1",
    ),
    "a lost node": ([ended(LOST, 5, hosts=["b"])], 9, False, "b cannot be used"),
    "a host that killed twice": (
        [ended(KILLED, 5, hosts=["b"]), ended(KILLED, 7, hosts=["b"])],
        9,
        False,
        "b cannot be used",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_decision(case: str) -> None:
    history, max_restarts, restart, reason = TABLE[case]
    decision = decide(history, max_restarts)
    assert decision.restart is restart
    assert reason in decision.reason


def test_the_first_restart_is_immediate_and_later_ones_are_delayed() -> None:
    delays = [
        decide([ended(KILLED, step) for step in range(1, count + 1)], 99).delay
        for count in range(1, 10)
    ]
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    after_progress = [ended(KILLED, 1), ended(KILLED, 2), ended(KILLED, 3, saved=3)]
    assert decide(after_progress, 99).delay == 0


def test_no_restart_after_a_stop_request_but_a_requeue() -> None:
    decision = decide([ended(KILLED, 5)], 9, stop_requested=True)
    assert (decision.restart, decision.requeue) == (False, True)
    assert not decide([diverged(5), diverged(5)], 9, stop_requested=True).requeue


@pytest.mark.parametrize(
    ("history", "excluded"),
    [
        ([ended(PREFLIGHT, hosts=["b", "c"])], ["b", "c"]),
        ([ended(LOST, 4, hosts=["b"])], ["b"]),
        ([ended(KILLED, 4, hosts=["b"]), ended(KILLED, 5, hosts=["c"])], []),
        ([ended(KILLED, 4, hosts=["b"]), ended(HANG, 5, hosts=["b"])], ["b"]),
        (
            [diverged(4, hosts=["b"]), diverged(5, hosts=["b"])],
            [],
        ),  # an exception is the program's fault, not the node's
    ],
)
def test_excluded_nodes(history: list[AttemptSummary], excluded: list[str]) -> None:
    decision = decide(history, 9)
    assert decision.exclude == excluded
    assert decision.requeue is bool(excluded)
    assert decide(history, 0).exclude == excluded


def test_a_run_without_progress_is_not_requeued_forever() -> None:
    job_starts = [
        ended(LOST, 4, hosts=[f"n{job_start}"], job_start=f"7-{job_start}")
        for job_start in range(4)
    ]
    assert decide(job_starts[:3], 1).requeue
    assert not decide(job_starts, 1).requeue


@pytest.mark.parametrize(
    ("verdict", "wanted", "can_exclude", "exclusions", "allowed"),
    [
        ("done", True, True, 1, False),
        ("stopped", True, False, 0, True),
        ("stopped", False, True, 1, False),
        ("failed", True, False, 1, False),
        ("failed", True, True, MAX_EXCLUSIONS, True),
        ("failed", True, True, MAX_EXCLUSIONS + 1, False),
        ("failed", False, True, 1, False),
    ],
)
def test_what_may_go_back_into_the_queue(
    verdict: str, wanted: bool, can_exclude: bool, exclusions: int, allowed: bool
) -> None:
    assert (
        may_requeue(verdict, wanted=wanted, can_exclude=can_exclude, exclusions=exclusions)
        is allowed
    )


def test_history_across_job_starts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    written = []
    for number in (1, 2, 10):
        folder = run.attempt(number)
        folder.path.mkdir()
        written.append(
            AttemptSummary(number, ERROR, error="é", step=number, hosts=["a"], job_start="7-0")
        )
        write_summary(folder, written[-1])
    run.attempt(3).path.mkdir()  # it has not failed
    (run.attempt(2).path / "summary.json").write_text("{torn")
    assert read_history(run) == [written[0], written[2]]
