"""The run tells how many steps it will have, wherever its loops know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.runtime.data.datasets import Numbers


def totals(
    folder: Path, body: Callable[[Any], None], max_steps: int | None = None
) -> list[int | None]:
    with paceline.session(
        seed=1, folder=folder, cpu=True, progress=False, report=False, max_steps=max_steps
    ) as run:
        body(run)
    events = map(json.loads, (folder / "events" / "rank-0.jsonl").read_text().splitlines())
    return [event["steps"] for event in events if event["event"] == "total_steps"]


def two_loops(run: Any) -> None:
    run.resume(weight=torch.nn.Linear(1, 1))
    for _ in run.epochs(3):
        for _ in run.steps(range(4)):
            pass
        for _ in run.steps(range(2)):
            pass


def one_loader(run: Any) -> None:
    loader = run.loader(Numbers(10), batch_size=2)
    run.resume(weight=torch.nn.Linear(1, 1), loader=loader)
    for _ in run.epochs(3):
        for _ in run.steps(loader):
            pass


def own_epochs(run: Any) -> None:
    for _ in range(3):
        for _ in run.steps(range(5)):
            pass


def one_pass(run: Any) -> None:
    for _ in run.steps(run.loader(Numbers(10), batch_size=2)):
        pass


def by_hand(run: Any) -> None:
    while not run.should_stop:
        pass


def some_steps(run: Any) -> None:
    for _ in run.steps(iter([1, 2, 3]), max_steps=2):
        pass


def endless(run: Any) -> None:
    for _ in run.epochs(2):
        for _ in run.steps(iter([1, 2, 3])):
            pass


@pytest.mark.parametrize(
    ("body", "max_steps", "expected"),
    [
        (one_loader, None, [15]),
        (one_loader, 7, [7]),
        (one_loader, 70, [15]),
        (two_loops, None, [12, 18]),  # the second loop of an epoch is known once it has begun
        (own_epochs, None, [5, None]),  # nobody knows how many will follow
        (one_pass, None, []),
        (one_pass, 4, [4]),
        (by_hand, 3, [3]),
        (some_steps, None, [2]),
        (endless, None, []),
        (endless, 5, [5]),
    ],
)
def test_total_steps(
    tmp_path: Path, body: Any, max_steps: int | None, expected: list[int | None]
) -> None:
    assert totals(tmp_path, body, max_steps) == expected


@pytest.mark.parametrize(
    ("body", "stop", "expected"), [(one_loader, 8, 15), (two_loops, 5, 18), (two_loops, 6, 18)]
)
def test_a_resumed_run_tells_the_same(tmp_path: Path, body: Any, stop: int, expected: int) -> None:
    totals(tmp_path, body, stop)
    assert totals(tmp_path, body)[-1] == expected
