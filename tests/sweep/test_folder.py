"""A sweep's folder between two commands: what is chosen to run again, and what a refusal leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cluster.slurm import commands as slurm
from paceline.cluster.slurm.states import JobState
from paceline.contract.sweep_folder import Point, Search
from paceline.errors import SpecError, UsageError
from paceline.plan.run_path import RunPath
from paceline.sweep.folder import Ledger
from paceline.sweep.submission import Submission, plan_chunks
from tests.sweep.folders import grid, make_sweep

SITE_OF = ("project", "base", "digits")


def ledger_of(tmp_path: Path, points: list[Point], **search: object) -> Ledger:
    make_sweep(tmp_path.joinpath(*SITE_OF), points, **search)
    return Ledger(RunPath(tmp_path, *SITE_OF))


def ended(ledger: Ledger, number: int, state: str) -> None:
    trial = ledger.folder.trial(number)
    trial.path.mkdir(parents=True, exist_ok=True)
    trial.result.write_text(json.dumps({"state": state}), encoding="utf-8")


def test_failed_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_of(tmp_path, grid({"x": value} for value in range(7)))
    for number, state in enumerate(("done", "failed", "pruned", "failed")):
        ended(ledger, number, state)
    assert ledger.chosen("failed") == [1, 3]
    assert ledger.chosen("missing") == [4, 5, 6]  # nobody was ever asked to run them
    ledger.note_job("7", submission="1", tasks={4: [4], 5: [5], 6: [6]})
    ledger.note_job("9", submission="2", tasks={5: [5]})
    # The older job of 5 is what its folder still knows; 6 goes on in a job of its own.
    for number, job in ((5, "7_5"), (6, "12_6")):
        ledger.folder.trial(number).path.mkdir()
        ledger.folder.trial(number).job.write_text(f"{job}\n", encoding="utf-8")
    words = {"7_4": "FAILED", "7_5": "CANCELLED", "9_5": "PENDING", "7_6": "COMPLETED", "12_6": "RUNNING"}
    found = {job: JobState(job, word) for job, word in words.items()}
    monkeypatch.setattr(slurm, "states", lambda jobs: {job: found[job] for job in jobs})
    assert ledger.chosen("missing") == [4]


def test_what_a_refusal_takes_back(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, grid([{"x": 1}, {"x": 2}]), space={"x": {"grid": [1, 2]}})
    ended(ledger, 1, "failed")
    ledger.folder.cancelled.touch()
    spec, points = ledger.folder.spec.read_text(), ledger.folder.points.read_text()
    search = Search("digits", metric="loss", space={"x": {"grid": [1, 2, 3]}})

    def submit() -> None:
        with ledger.written(search, [Point(2, 2, {"x": 3})]), ledger.reopened([1]):
            assert len(ledger.folder.read_points()) == 3
            assert not ledger.folder.trial(1).result.exists()
            assert not ledger.folder.cancelled.exists()
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        submit()
    assert (ledger.folder.spec.read_text(), ledger.folder.points.read_text()) == (spec, points)
    assert ledger.folder.trial(1).result.exists()
    assert ledger.folder.cancelled.exists()


def test_a_sweep_goes_on_only_as_itself(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, [], sampler="random", space={"x": {"uniform": [0.0, 1.0]}})
    same = Search("digits", metric="loss", sampler="random", space={"x": {"uniform": [0.0, 1.0]}})
    ledger.refuse_another(same)
    with pytest.raises(SpecError, match="another space"):
        ledger.refuse_another(Search("digits", metric="loss", sampler="random", space={}))
    with pytest.raises(SpecError, match="another sampler: 'random'"):
        ledger.refuse_another(Search("digits", metric="loss", sampler="grid"))
    run = tmp_path / "project" / "base" / "a-run"
    run.mkdir()
    (run / "run.json").touch()
    with pytest.raises(UsageError, match="is a run, not a sweep"):
        Ledger(RunPath(tmp_path, "project", "base", "a-run")).refuse_another(same)
    assert Ledger(RunPath(tmp_path, *SITE_OF)).kit_path().folder.path == ledger.folder.submission(1)
    assert ledger.trial_path(3).folder.path == ledger.folder.trial(3).path


def test_throttling_counts_trials_also_where_they_share_jobs() -> None:
    assert Submission(None, None, pack=4, parallel=10).throttle == 3  # type: ignore[arg-type]
    assert Submission(None, None, pack=1, parallel=None).throttle is None  # type: ignore[arg-type]
    chunks = plan_chunks(range(100), pack=4, largest=10, most=None)
    assert [len(chunk.tasks) for chunk in chunks] == [10, 10, 5]
