"""A sweep's folder between two commands: which trials run again, and what a failed submission leaves."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.contract.sweep_folder import Point, Search
from paceline.errors import SpecError, UsageError
from paceline.slurm import squeue_and_sacct
from paceline.slurm.job_states import JobState
from paceline.spec.run_path import RunPath
from paceline.sweep.folder import SweepWriter
from paceline.sweep.results import read_sweep
from paceline.sweep.slurm_sweep import SlurmSweep, plan_chunks
from tests.sweep.folders import grid, make_sweep

PATH = ("project", "base", "digits")


def writer_of(tmp_path: Path, points: list[Point], **search: object) -> SweepWriter:
    make_sweep(tmp_path.joinpath(*PATH), points, **search)
    return SweepWriter(RunPath(tmp_path, *PATH))


def ended(writer: SweepWriter, number: int, state: str) -> None:
    trial = writer.folder.trial(number)
    trial.path.mkdir(parents=True, exist_ok=True)
    trial.result.write_text(json.dumps({"state": state}), encoding="utf-8")


def selected(writer: SweepWriter, state: str) -> list[int]:
    """Return the trials that `--resubmit` selects."""
    trials = read_sweep(writer.folder, squeue_and_sacct.states).trials
    return [trial.number for trial in trials if trial.state == state]


def test_failed_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(tmp_path, grid({"x": value} for value in range(7)))
    for number, state in enumerate(("done", "failed", "pruned", "failed")):
        ended(writer, number, state)
    assert selected(writer, "failed") == [1, 3]
    assert selected(writer, "missing") == [4, 5, 6]  # they were never submitted
    writer.folder.record_job("7", submission="1", tasks={4: [4], 5: [5], 6: [6]})
    writer.folder.record_job("9", submission="2", tasks={5: [5]})
    # The folder of 5 still names its older job; 6 continues in a job of its own.
    for number, job in ((5, "7_5"), (6, "12_6")):
        writer.folder.trial(number).path.mkdir()
        writer.folder.trial(number).job.write_text(f"{job}\n", encoding="utf-8")
    args = {
        "7_4": "FAILED",
        "7_5": "CANCELLED",
        "9_5": "PENDING",
        "7_6": "COMPLETED",
        "12_6": "RUNNING",
    }
    found = {job: JobState(job, word) for job, word in args.items()}
    monkeypatch.setattr(squeue_and_sacct, "states", lambda jobs: {job: found[job] for job in jobs})
    assert selected(writer, "missing") == [4]


def test_trials_that_never_started_are_run_by_the_next_command(tmp_path: Path) -> None:
    points = [{"x": value} for value in range(4)]
    writer = writer_of(tmp_path, grid(points), space={"x": {"grid": [0, 1, 2, 3]}})
    ended(writer, 0, "failed")
    writer.folder.record_job("7", submission="1", tasks={1: [1]})
    assert writer.never_started() == [2, 3]
    search = Search("digits", metric="loss", space={"x": {"grid": [0, 1, 2, 3, 4]}})
    created = writer.folder.read_search().created
    writer.add_trials(search, [Point(4, 4, {"x": 4})])
    assert SweepWriter(RunPath(tmp_path, *PATH)).never_started() == [2, 3, 4]
    assert writer.folder.read_search().created == created
    writer.folder.cancelled.touch()
    assert writer.never_started() == []
    with suppress(KeyError), writer.reopened([0]):
        raise KeyError("sbatch refused")
    assert writer.folder.cancelled.exists()
    assert writer.folder.trial(0).result.exists()
    with writer.reopened([0]):
        pass
    assert not writer.folder.cancelled.exists()
    assert not writer.folder.trial(0).result.exists()


def test_a_sweep_resumes_only_with_the_same_search(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, [], sampler="random", space={"x": {"uniform": [0.0, 1.0]}})
    same = Search("digits", metric="loss", sampler="random", space={"x": {"uniform": [0.0, 1.0]}})
    writer.check_search(same)
    with pytest.raises(SpecError, match="a different space"):
        writer.check_search(Search("digits", metric="loss", sampler="random", space={}))
    with pytest.raises(SpecError, match="a different sampler: 'random'"):
        writer.check_search(Search("digits", metric="loss", sampler="grid"))
    run = tmp_path / "project" / "base" / "a-run"
    run.mkdir()
    (run / "run.json").touch()
    with pytest.raises(UsageError, match="is a run, not a sweep"):
        SweepWriter(RunPath(tmp_path, "project", "base", "a-run")).check_search(same)
    assert SweepWriter(
        RunPath(tmp_path, *PATH)
    ).submission_path().folder.path == writer.folder.submission(1)
    assert writer.trial_path(3).folder.path == writer.folder.trial(3).path


def test_throttling_counts_trials_that_share_a_job() -> None:
    for pack, parallel, tasks in ((4, 10, 3), (1, None, None)):
        sweep = SimpleNamespace(settings=SimpleNamespace(pack=pack), parallel=parallel)
        assert SlurmSweep.throttle.fget(sweep) == tasks  # type: ignore[attr-defined]
    chunks = plan_chunks(range(100), pack=4, max_array=10, max_tasks=None)
    assert [len(chunk.tasks) for chunk in chunks] == [10, 10, 5]
