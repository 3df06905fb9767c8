"""The results of a sweep, from its folder and one query to the scheduler."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.contract.claims import describe_processes, local_job_start_name
from paceline.contract.sweep_folder import Point, SweepFolder
from paceline.errors import ClusterError, UsageError
from paceline.launch.run_folder import claim_run
from paceline.slurm.job_states import JobState
from paceline.sweep.folder import STARTER, mark_starter
from paceline.sweep.results import Sweep, best_first, find_sweep, read_sweep, rows
from tests.sweep.folders import begin, end, grid, make_sweep, record_jobs

RATES = [{"lr": rate} for rate in (0.1, 0.01, 0.001, 0.0001, 0.00001, 0.000001)]


class Scheduler:
    """Answers as squeue would, and counts the queries."""

    def __init__(self, **states: str) -> None:
        self.states = {name.removeprefix("j"): state for name, state in states.items()}
        self.queries = 0

    def __call__(self, jobs: Iterable[str]) -> dict[str, JobState]:
        self.queries += 1
        return {job: JobState(job, self.states[job]) for job in jobs if job in self.states}


def states(sweep: Sweep) -> dict[int, str]:
    return {trial.number: trial.state for trial in sweep.trials}


def test_every_state_a_trial_can_be_in(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "rates", grid(RATES))
    record_jobs(folder, "7", {str(index): [index] for index in range(6)})
    end(folder, 0, value=0.5)
    end(folder, 1, "failed", error="ValueError: no\nmore")
    begin(folder, 2, job="7_2")
    folder.trial(2).reports.write_text(
        '{"step": 1, "value": 0.9}\n{"step": 2, "value": 0.7}\n{"ste'
    )
    begin(folder, 3, job="7_3")
    scheduler = Scheduler(j7_2="RUNNING", j7_3="CANCELLED", j7_4="PENDING")
    sweep = read_sweep(folder, scheduler)
    assert states(sweep) == {
        0: "done",
        1: "failed",
        2: "running",
        3: "missing",
        4: "pending",
        5: "missing",
    }
    assert scheduler.queries == 1
    done, failed, running, _, pending, gone = sweep.trials
    assert (done.value, done.seconds, done.point) == (0.5, 30.0, {"lr": 0.1})
    assert failed.error == "ValueError: no"
    assert running.value == 0.7
    assert pending.job == "7_4"
    assert gone.error == "its job 7_5 is gone"
    assert sweep.counts == {"done": 1, "failed": 1, "missing": 2, "running": 1, "pending": 1}


def test_a_resubmitted_trial_is_pending_until_it_starts(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "rates", grid(RATES[:2]))
    record_jobs(folder, "7", {"0": [0], "1": [1]})
    end(folder, 0, value=0.5)
    end(folder, 1, "failed", error="ValueError: no")
    record_jobs(folder, "8", {"0": [1]})
    folder.trial(1).result.unlink()  # as the command does
    assert states(read_sweep(folder, Scheduler(j8_0="PENDING"))) == {0: "done", 1: "pending"}
    assert states(read_sweep(folder, Scheduler(j8_0="FAILED"))) == {0: "done", 1: "missing"}


def test_trials_without_a_job_are_missing(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "rates", grid(RATES[:3]))
    begin(folder, 0)
    claim_run(folder.trial(0))
    # interrupted: it has no result
    folder.trial(0).job_start(local_job_start_name()).verdict.write_text("failed\n")
    record_jobs(folder, "7", {"1": [1]})  # and the queue took no more
    submission = folder.submission(1)
    submission.mkdir(parents=True)

    def now() -> dict[int, str]:
        return states(read_sweep(folder, Scheduler(j7_1="PENDING")))

    assert now() == {0: "missing", 1: "pending", 2: "missing"}
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", "paceline"]
    with mark_starter(submission), subprocess.Popen(sleep) as other:
        try:
            (submission / STARTER).write_text(describe_processes([other.pid]))
            assert now() == {0: "pending", 1: "pending", 2: "pending"}
        finally:
            other.kill()
    assert now() == {0: "missing", 1: "pending", 2: "missing"}


def test_without_a_scheduler_states_come_from_the_folder(tmp_path: Path) -> None:
    def silent(_: Iterable[str]) -> dict[str, JobState]:
        raise ClusterError("no squeue here")

    folder = make_sweep(tmp_path / "rates", grid(RATES[:3]))
    record_jobs(folder, "7", {"0": [0, 1, 2]})
    end(folder, 0, value=0.5)
    begin(folder, 1, job="7_0")
    assert states(read_sweep(folder, silent)) == {0: "done", 1: "running", 2: "pending"}


def test_the_error_is_found_in_the_logs_if_the_result_has_none(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "rates", grid(RATES[:1]))
    end(folder, 0, "failed")
    attempt = folder.trial(0).attempt(2)
    attempt.path.mkdir()
    attempt.failure.write_text(
        json.dumps({"cause": "error", "type": "KeyError", "message": "'x'\nsecond"})
    )
    assert read_sweep(folder).trials[0].error == "KeyError: 'x'"


def test_points_chosen_at_run_time(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "late", [Point(number, number, None) for number in range(3)], sampler="tpe"
    )
    end(folder, 0, value=1.0, point={"lr": 0.3})
    begin(folder, 1, point={"lr": 0.4})
    sweep = read_sweep(folder)
    assert [trial.point for trial in sweep.trials] == [{"lr": 0.3}, {"lr": 0.4}, {}]
    assert sweep.keys == ["lr"]


def test_a_search_without_a_point_for_a_trial(tmp_path: Path) -> None:
    folder = make_sweep(
        tmp_path / "over", [Point(number, number, None) for number in range(2)], sampler="wandb"
    )
    end(folder, 0, value=1.0, point={"lr": 0.3})
    end(folder, 1, "none")
    assert states(read_sweep(folder)) == {0: "done"}


def test_values_that_are_not_numbers_become_none(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "odd", grid(RATES[:3]))
    end(folder, 0, value=float("nan"))
    end(folder, 1, value=float("inf"))
    end(folder, 2, value=3.0)
    sweep = read_sweep(folder)
    assert [row.number for row in best_first(sweep, rows(sweep))] == [2, 0, 1]


def test_best_first(tmp_path: Path) -> None:
    points = [
        {"lr": 0.1, "name": "b"},
        {"lr": 0.3, "name": "a"},
        {"lr": 0.2},
        {"lr": 0.4, "name": "c"},
    ]
    for direction, best in (("minimize", [2, 0, 1, 3]), ("maximize", [0, 2, 1, 3])):
        folder = make_sweep(tmp_path / direction, grid(points), direction=direction)
        end(folder, 0, value=0.8)
        end(folder, 1, "pruned", value=0.1)
        end(folder, 2, value=0.2)
        sweep = read_sweep(folder)
        # a pruned value is not final
        assert [row.number for row in best_first(sweep, rows(sweep))] == best


def test_seeds_are_one_row_with_mean_and_deviation(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "repeats", grid(RATES[:2], seeds=3))
    for number, value in enumerate([1.0, 2.0, 3.0]):
        end(folder, number, value=value, seed=number)
    end(folder, 3, value=1.5, seed=0)
    end(folder, 4, "failed", seed=1)
    record_jobs(folder, "7", {"5": [5]})
    sweep = read_sweep(folder, Scheduler(j7_5="PENDING"))
    second, first = best_first(sweep, rows(sweep))
    assert (first.value, first.deviation, first.count) == (2.0, 1.0, 3)
    assert (second.value, second.deviation, second.count) == (1.5, None, 1)
    assert second.status == "1 done, 1 failed, 1 pending"


def test_a_sweep_is_found_by_name_folder_and_time(tmp_path: Path) -> None:
    for name in ("digits", "digits-long", "words"):
        make_sweep(tmp_path / "project" / "default" / name, [])
    assert find_sweep("digits", tmp_path).name == "digits"
    assert find_sweep("digits-", tmp_path).name == "digits-long"
    assert find_sweep(str(tmp_path / "project" / "default" / "words"), tmp_path).name == "words"
    assert find_sweep("last", tmp_path).name == "words"
    with pytest.raises(UsageError, match="matches 2 sweeps"):
        find_sweep("dig", tmp_path)
    with pytest.raises(UsageError, match="no sweep 'letters'") as caught:
        find_sweep("letters", tmp_path)
    assert "digits, digits-long, words" in caught.value.hint
    with pytest.raises(UsageError, match="You have no sweeps in"):
        find_sweep("last", tmp_path / "elsewhere")


def test_a_sweep_without_trials(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "empty")
    folder.path.mkdir()
    folder.spec.write_text("{}")
    assert read_sweep(folder).trials == []
