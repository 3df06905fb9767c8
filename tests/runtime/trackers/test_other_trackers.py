"""TensorBoard and custom trackers; a tracker never affects the run."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline.contract.run_folder import DONE
from paceline.runtime.trackers import threads
from paceline.runtime.trackers.base import RunInfo
from tests.forked_ranks import Ranks
from tests.runtime.metrics.test_metrics import lines_of
from tests.runtime.trackers.test_wandb_run import our_lines, run_environment, train
from tests.runtime.training.test_wrap import quiet


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return what TensorBoard would show, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        name: {event.step: event.value for event in reader.Scalars(name)}
        for name in reader.Tags()["scalars"]
    }


def fail_then_resume() -> None:
    with pytest.raises(ValueError, match="as planned"):
        train(fail_at=5)
    train()


def test_tensorboard_shows_the_numbers_of_metrics_jsonl(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks(fail_then_resume, 1, env=run_environment(folder, tensorboard=True, world_size=1))
    shown = scalars(folder / "trackers" / "tensorboard")
    expected: dict[str, dict[int, float]] = defaultdict(dict)
    for line in lines_of(folder):  # the last line of a step counts
        for name, value in line.items():
            if name not in ("step", "time", "phase"):
                expected[name][line["step"]] = value
    assert set(shown) == set(expected)
    for name in ("loss", "accuracy", "epoch"):
        assert shown[name] == pytest.approx(expected[name], rel=1e-6)


class Recorder:
    """A custom tracker as in the documentation."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        Recorder.made.append(self)

    def start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.run_id, run.params, run.world_size))

    def log(self, step: int, values: dict[str, float | str]) -> None:
        self.calls.append((step, values))

    def finish(self, status: str) -> None:
        self.calls.append(("finish", status))


def record(named: bool) -> list[list[tuple[Any, ...]]]:
    mine = [] if named else [Recorder()]
    with quiet(trackers=mine) as run:
        for step in run.steps(range(4)):
            run.log(number=step, odd=float("inf"), word="a")
    return [each.calls for each in Recorder.made]


@pytest.mark.parametrize("named", [False, True])
def test_a_custom_tracker_gets_every_line_on_rank_zero(
    ranks: Ranks, tmp_path: Path, named: bool
) -> None:
    folder = tmp_path / "run"
    tracking = (
        {"trackers": ["tests.runtime.trackers.test_other_trackers:Recorder"]} if named else {}
    )
    first, second = ranks(record, 2, named, env=run_environment(folder, world_size=2, **tracking))
    assert second == ([] if named else [[]])
    (calls,) = first
    assert calls[0] == ("start", "20260102-030405-abcd", {"lr": 0.1, "net": {"width": 4}}, 2)
    assert calls[-1] == ("finish", DONE)
    lines = lines_of(folder)
    assert [{"step": step, **values} for step, values in calls[1:-1]] == [
        {**line, "odd": float("inf")} for line in lines
    ]
    assert [line["number"] for line in lines] == [0, 1, 2, 3]


class Breaks:
    def __init__(self, where: str) -> None:
        self.where = where

    def start(self, run: RunInfo) -> None:
        self.fail_at("start")

    def log(self, step: int, values: dict[str, float | str]) -> None:
        self.fail_at("log")

    def finish(self, status: str) -> None:
        self.fail_at("finish")

    def fail_at(self, where: str) -> None:
        if where == self.where:
            raise KeyError("no such column")
        if self.where == "hangs":
            time.sleep(30)


@pytest.mark.parametrize("where", ["start", "log", "finish", "hangs"])
def test_a_failing_tracker_costs_one_warning(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Recorder()
    with monkeypatch.context() as patch:
        patch.setitem(threads.FINISH_TIMEOUTS, "done", 0.3)
        with contextlib.redirect_stderr(io.StringIO()) as output:
            with quiet(folder=tmp_path, trackers=[Breaks(where), other]) as run:
                for step in run.steps(range(20)):
                    run.log(number=step)
    (line,) = our_lines(output.getvalue())
    assert line.startswith(
        "paceline: Breaks did not finish" if where == "hangs" else "paceline: Breaks gets no more"
    )
    assert [each["number"] for each in lines_of(tmp_path)] == list(range(20))
    assert [values["number"] for _, values in other.calls[1:-1]] == list(range(20))


def test_trackers_that_cannot_be_created_are_skipped_with_a_warning(tmp_path: Path) -> None:
    wrong = [
        "no.such.module:Class",
        "tests.runtime.trackers.test_other_trackers:lines_of",
        "plain",
        "tests.runtime.trackers:Nobody",
    ]
    with contextlib.redirect_stderr(io.StringIO()) as output:
        with quiet(folder=tmp_path, trackers=wrong) as run:
            for step in run.steps(range(2)):
                run.log(number=step)
            assert type(run.wandb).__name__ == "NoopRun"
    lines = our_lines(output.getvalue())
    assert [line.split(" is disabled: ")[0].removeprefix("paceline: ") for line in lines] == wrong
    assert len(lines_of(tmp_path)) == 2


def test_nothing_is_imported_and_no_thread_runs_while_trackers_are_off(tmp_path: Path) -> None:
    code = (
        "import sys, threading, paceline\n"
        "with paceline.session(cpu=True, report=False, folder=sys.argv[1]) as run:\n"
        "    for step in run.steps(range(2)): run.log(number=step)\n"
        "    names = [thread.name for thread in threading.enumerate()]\n"
        "assert names == ['MainThread'], names\n"
        "assert not {'wandb', 'tensorboard', 'yaml'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
