"""Trials as jobs open and close them, and what scripts report from within."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import sweep_points
from paceline.agent.sweep_trial import arguments, close_trial, main, merge_params, open_trial
from paceline.contract.foreign_records import EventWriter
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.sweep_folder import NoPoint, Point, Search, SweepFolder
from paceline.errors import LaunchError, UsageError
from paceline.runtime.metrics.report import (
    TrialReporter,
    is_below_median,
    is_halved,
    read_reports,
    report,
)
from paceline.staging.working_directory import WorkingDirectory
from paceline.sweep.results import read_sweep

ORDER = LaunchSpec(
    "submission", "/code/train.py", [], params={"lr": 1, "model": {"depth": 3}}, experiment="base"
)


def make(tmp_path: Path, points: list[Point], **search: Any) -> tuple[SweepFolder, Path]:
    sweep = SweepFolder(tmp_path / "digits")
    submission = sweep.submission(1)
    submission.mkdir(parents=True)
    sweep.spec.write_text(
        Search("digits", **{"metric": "loss", **search}).to_json(), encoding="utf-8"
    )
    sweep.points.write_text("".join(point.to_line() for point in points), encoding="utf-8")
    (submission / "launch.json").write_text(ORDER.to_json(), encoding="utf-8")
    (submission / "run.json").write_text(
        json.dumps({"run_id": "submission", "experiment": "x/y"}), encoding="utf-8"
    )
    (submission / "paceline.zip").write_bytes(b"")
    return sweep, submission


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_each_trial_has_its_own_working_directory(tmp_path: Path) -> None:
    sweep, first = make(tmp_path, [Point(0, 0, {"lr": 1}), Point(1, 1, {"lr": 2})])
    second, live = sweep.submission(2), tmp_path / "project"
    shutil.copytree(first, second)
    for submission in (first, second):
        (submission / "code/sub").mkdir(parents=True)
        (submission / "code/sub/train.py").write_text(submission.name)
        root = f"{submission}/work/project"
        work = {"code": f"{submission}/code", "project": str(live), "links": []}
        spec = replace(
            ORDER,
            program=f"{root}/sub/train.py",
            cwd=f"{root}/sub",
            source=root,
            import_path=["/lib", root],
            work=work,
        )
        (submission / "launch.json").write_text(spec.to_json())

    def start(number: int, submission: Path) -> Path:
        trial = open_trial(sweep, submission, number)
        made = LaunchSpec.from_json(trial.launch_spec.read_text())
        root = trial.work / "project"
        assert (made.program, made.cwd, made.source) == (
            f"{root}/sub/train.py",
            f"{root}/sub",
            str(root),
        )
        assert made.import_path == ["/lib", str(root)]
        folder = WorkingDirectory.of(made)
        assert folder is not None
        folder.fill(made.cwd)
        return Path(made.cwd)

    assert start(0, first) != start(1, first)
    (start(0, first) / "out.txt").write_text("of trial 0")
    # Submitted again with other code, after its job was killed: the new code, and its own files.
    again = start(0, second)
    assert ((again / "train.py").read_text(), (again / "out.txt").read_text()) == (
        "2",
        "of trial 0",
    )

    # Submitted again with the same code, but another choice of what to link: the old link is gone, not followed.
    shutil.copytree(second / "code", live, dirs_exist_ok=True)
    spec = LaunchSpec.from_json((second / "launch.json").read_text())
    for links in (["sub"], []):
        (second / "launch.json").write_text(
            replace(spec, work={**spec.work, "links": links}).to_json()
        )
        start(1, second)
        assert (sweep.trial(1).work / "project/sub").is_symlink() == bool(links)
    assert (sweep.trial(1).work / "project/sub/train.py").exists()
    assert [path.name for path in live.rglob("*")] == ["sub", "train.py"]


# -- arguments ---------------------------------------------------------------------------------------------


def test_keys_missing_from_the_template_are_appended() -> None:
    space: dict[str, Any] = {key: {"grid": [1]} for key in ("lr", "momentum", "fast", "widths")}
    search = Search(
        "s", space=space, args=["--epochs", "3", "--rate={lr}", "--momentum", "{momentum}"]
    )
    point = {"lr": 0.5, "momentum": 0.9, "fast": True, "widths": [1, 2]}
    assert arguments(search, point, None) == [
        "--epochs",
        "3",
        "--rate=0.5",
        "--momentum",
        "0.9",
        "--fast",
        "--widths",
        "1",
        "2",
    ]
    # A key that does not apply is dropped with its option; a false boolean adds nothing.
    assert arguments(search, {"lr": 0.5, "fast": False}, None) == ["--epochs", "3", "--rate=0.5"]


def test_the_point_overrides_params_of_the_file() -> None:
    params = {"lr": 1, "model": {"depth": 3}}
    assert merge_params(params, {"lr": 2, "model.width": 8, "a.b.c": 1}) == {
        "lr": 2,
        "model": {"depth": 3, "width": 8},
        "a": {"b": {"c": 1}},
    }
    assert params == {"lr": 1, "model": {"depth": 3}}


# -- opening and closing -----------------------------------------------------------------------------------


def test_a_trial_is_a_run_of_its_own(tmp_path: Path) -> None:
    points = [Point(0, 0, {"lr": 0.1}), Point(1, 1, {"lr": 0.2}, seed=3)]
    sweep, submission = make(tmp_path, points, space={"lr": {"grid": [0.1, 0.2]}})
    trial = open_trial(sweep, submission, 1)
    launch_spec = LaunchSpec.from_json(trial.launch_spec.read_text(encoding="utf-8"))
    assert launch_spec.run_id == "digits-1"
    assert launch_spec.args == ["--lr", "0.2"]
    assert launch_spec.params == {"lr": 0.2, "model": {"depth": 3}}
    assert launch_spec.runtime == {"seed": 3}
    assert stat.S_IMODE(os.stat(trial.launch_spec).st_mode) == 0o600
    assert read(trial.run_json)["experiment"] == "base"
    assert read(trial.trial)["point"] == {"lr": 0.2}
    assert trial.run_half.resolve() == (submission / "paceline.zip").resolve()
    assert not sweep.trial(0).path.exists()
    with pytest.raises(LaunchError, match="has no trial 7"):
        open_trial(sweep, submission, 7)
    assert main(["open", str(sweep.path), str(submission), "7"]) == 1


def test_the_last_report_is_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, submission = make(tmp_path, [Point(0, 0, {"lr": 0.1})])
    trial = open_trial(sweep, submission, 0)
    trial.metrics.write_text(
        '{"step": 1, "loss": 5.0}\n{"step": 2, "lr": 1.0}\n{"half', encoding="utf-8"
    )
    assert close_trial(sweep, 0, "done")["value"] == 5.0
    trial.metrics.write_text(
        '{"step": 1, "loss": 5.0}\n{"step": 2, "loss": "nan"}\n', encoding="utf-8"
    )
    result = close_trial(sweep, 0, "done")
    assert (result["state"], result["value"]) == ("done", None)
    assert result["error"] == "it ended without a value for loss"
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_RUN", str(trial.path))
        patch.setenv("RANK", "0")
        report(3.0, step=1)
        report(2.5, step=2)
        patch.setenv("RANK", "1")
        report(9.0, step=3)
    result = close_trial(sweep, 0, "done")
    assert (result["state"], result["value"], result["step"]) == ("done", 2.5, 2)
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_RUN", str(trial.path))
        report(float("nan"), step=3)
    assert close_trial(sweep, 0, "done")["value"] is None
    assert result["point"] == {"lr": 0.1}
    trial.pruned.touch()
    assert close_trial(sweep, 0, "done")["state"] == "pruned"
    assert close_trial(sweep, 0, "failed")["state"] == "failed"
    open_trial(sweep, submission, 0)
    assert not trial.result.exists()
    assert close_trial(sweep, 0, "done")["state"] == "done"


def test_a_failure_is_summarized_in_one_line(tmp_path: Path) -> None:
    sweep, submission = make(tmp_path, [Point(0, 0, {"lr": 0.1})])
    trial = open_trial(sweep, submission, 0)

    def shown(verdict: str = "failed") -> str:
        close_trial(sweep, 0, verdict)
        (found,) = read_sweep(sweep).trials
        return found.error

    trial.slurm_log.write_text(
        "paceline: no room\npaceline: job 1_0: trial 0: failed\n", encoding="utf-8"
    )
    assert shown() == "no room"
    events = EventWriter(trial.events / "agent-0.jsonl")
    events.write("failed", reason="the first error")
    events.write("failed", reason="no network", job_start="1_0-1")
    events.close()
    assert shown() == "no network", "an agent's own record counts more than the log"
    attempt = trial.attempt(1)
    attempt.path.mkdir()
    attempt.failure.write_text(
        json.dumps({"cause": "error", "host": "h", "type": "ValueError", "message": "bad\nmore"}),
        encoding="utf-8",
    )
    assert shown() == "ValueError: bad"
    assert shown("stopped") == "stopped before it finished"


def test_each_line_of_a_list_has_its_own_arguments(tmp_path: Path) -> None:
    point = Point(0, 0, {"lr": 0.1}, program="a.py", args=["--lr", "0.1", "x y"])
    sweep, submission = make(tmp_path, [point], sampler="list")
    (submission / "programs.json").write_text('{"a.py": "/submission/code/a.py"}', encoding="utf-8")
    launch_spec = LaunchSpec.from_json(
        open_trial(sweep, submission, 0).launch_spec.read_text(encoding="utf-8")
    )
    assert (launch_spec.program, launch_spec.args) == (
        "/submission/code/a.py",
        ["--lr", "0.1", "x y"],
    )


# -- Optuna ------------------------------------------------------------------------------------------------

SPACE = {
    "kind": {"grid": ["a", "b"]},
    "x": {"uniform": [0.0, 1.0]},
    "n": {"integer": [2, 8], "step": 2, "log": False},
    "lr": {"log_uniform": [1e-4, 1.0]},
    "widths": {"grid": [[1, 2], [3]]},
    "only_b": {"grid": [True, False], "when": {"kind": ["b"]}},
}


def test_tpe_chooses_one_point_for_all_seeds_and_receives_their_mean(tmp_path: Path) -> None:
    points = [Point(number, number // 2, None, seed=number % 2) for number in range(4)]
    sweep, submission = make(tmp_path, points, sampler="tpe", space=SPACE)
    records = [read(open_trial(sweep, submission, number).trial) for number in range(4)]
    assert records[0]["point"] == records[1]["point"] != records[2]["point"]
    point = records[0]["point"]
    assert 0 <= point["x"] <= 1
    assert point["n"] in (2, 4, 6, 8)
    assert point["widths"] in ([1, 2], [3])
    assert ("only_b" in point) == (point["kind"] == "b")
    # a start after a requeue keeps the same point
    assert read(open_trial(sweep, submission, 0).trial) == records[0]

    study = sweep_points.open_study(sweep, sweep.read_search())
    for number, value in ((0, 1.0), (1, 3.0)):
        trial = sweep.trial(number)
        trial.reports.write_text(json.dumps({"step": 1, "value": value}) + "\n", encoding="utf-8")
        assert study.trials[0].state.name == "RUNNING"
        close_trial(sweep, number, "done")
    assert study.trials[0].value == 2.0
    close_trial(sweep, 2, "failed")
    close_trial(sweep, 3, "failed")
    assert study.trials[1].state.name == "FAIL"
    # Run again after its failure: the same point.
    assert read(open_trial(sweep, submission, 2).trial) == records[2]


def start(sweep: SweepFolder, submission: Path, number: int) -> TrialReporter:
    """Open a trial and return what its rank 0 reports to."""
    trial = open_trial(sweep, submission, number)
    launch_spec = LaunchSpec.from_json(trial.launch_spec.read_text(encoding="utf-8"))
    return TrialReporter(trial.path, trial=launch_spec.trial, rank=0)


def test_the_pruner_receives_every_report_once(tmp_path: Path) -> None:
    points = [Point(0, 0, {"x": 0}), Point(1, 1, {"x": 1})]
    sweep, submission = make(tmp_path, points, prune="halving", space={"x": {"grid": [0, 1]}})
    good, bad = (start(sweep, submission, number) for number in (0, 1))
    assert [good.record(value, step) for step, value in enumerate((1.0, 0.5, 0.4))] == [False] * 3
    assert bad.record(3.0, 0) is True
    assert sweep.trial(1).pruned.exists()
    # Ranks that fail while stopping are restarted: the decision holds.
    trial = LaunchSpec.from_json(sweep.trial(1).launch_spec.read_text(encoding="utf-8")).trial
    again = TrialReporter(sweep.trial(1).path, trial=trial, rank=0)
    assert again.record(3.0, 0) is True
    again.close()
    other = TrialReporter(sweep.trial(1).path, trial=trial, rank=1)
    assert other.can_prune
    assert other.record(3.0, 1) is False  # rank 0 decides
    # After a restart, reporting a step again is the same report.
    good.close()
    more = TrialReporter(sweep.trial(0).path, trial={**trial, "number": 0}, rank=0)
    assert more.record(9.0, 2) is False
    assert read_reports(sweep.trial(0)) == {1: 1.0, 2: 0.5, 3: 0.4}
    more.close()
    bad.close()


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_point_is_pruned_by_the_mean_of_its_seeds_and_with_all_of_them(
    tmp_path: Path, sampler: str
) -> None:
    points = [
        Point(
            number, number // 3, None if sampler == "tpe" else {"x": number // 3}, seed=number % 3
        )
        for number in range(9)
    ]
    sweep, submission = make(
        tmp_path, points, sampler=sampler, prune="halving", space={"x": {"grid": [0, 1, 2]}}
    )
    trials = {number: start(sweep, submission, number) for number in (0, 1, 2, 3, 4, 6)}
    # The first point has values 2 and 4: none of its seeds competes with another.
    assert [trials[0].record(2.0, 1), trials[1].record(4.0, 1)] == [False, False]
    # 2.5 beats the mean of 3; with 4.5, the second point's mean does not.
    assert [trials[3].record(2.5, 1), trials[3].record(2.5, 2)] == [False, False]
    assert trials[4].record(4.5, 1) is True
    assert trials[3].record(0.0, 3) is True  # the point ends with all seeds, at their next report
    with pytest.raises(NoPoint, match="trial 5 does not start: its point was pruned"):
        open_trial(sweep, submission, 5)
    assert main(["open", str(sweep.path), str(submission), "5"]) == 3
    for number, verdict in ((4, "done"), (3, "done")):
        close_trial(sweep, number, verdict)
    assert [read(sweep.trial(number).result)["state"] for number in (3, 4, 5)] == ["pruned"] * 3
    assert read(sweep.trial(5).result)["point"] == read(sweep.trial(3).trial)["point"]
    if sampler == "tpe":
        study = sweep_points.open_study(sweep, sweep.read_search())
        assert study.trials[1].state.name == "PRUNED"
    # The third point is better than the first one's mean.
    assert trials[6].record(1.0, 1) is False
    for number in (0, 1, 2):
        close_trial(sweep, number, "done")
    if sampler == "tpe":
        assert (study.trials[0].state.name, study.trials[0].value) == ("COMPLETE", 3.0)
    for each in trials.values():
        each.close()


def test_the_median_is_that_of_points_whose_seeds_are_all_done(tmp_path: Path) -> None:
    points = [
        Point(number, number // 2, {"x": number // 2}, seed=number % 2) for number in range(12)
    ]
    sweep, submission = make(
        tmp_path, points, direction="maximize", prune="median", space={"x": {"grid": [*range(6)]}}
    )
    last = start(sweep, submission, 10)
    for number in range(8):
        trial = start(sweep, submission, number)
        assert trial.record(1.0, 1) is False
        assert last.record(0.0, number) is False
        trial.close()
        close_trial(sweep, number, "done")
    first = start(sweep, submission, 8)
    assert first.record(1.5, 1) is False
    assert start(sweep, submission, 11).record(0.5, 1) is True
    assert last.record(2.0, 9) is True  # with its other seed
    first.close()
    last.close()


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("prune", ["halving", "median"])
def test_single_trials_are_pruned_as_optuna_would(prune: str, after: int) -> None:
    optuna = sweep_points.import_optuna()
    pruners = {
        "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=after, reduction_factor=3),
        "median": optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=after),
    }
    study = optuna.create_study(pruner=pruners[prune])
    dice = random.Random(after)
    rivals: list[dict[int, float]] = []
    decisions = []
    for _ in range(40):
        trial, own = study.ask(), {}
        level = dice.random()
        for count in range(1, 10):
            own[count] = level + dice.random() / count
            trial.report(own[count], count)
            decisions.append(trial.should_prune())
            if prune == "halving":
                assert is_halved(own, rivals, after=after) == decisions[-1]
            else:
                assert is_below_median(own, rivals, after=after) == decisions[-1]
            if decisions[-1]:
                break
        study.tell(
            trial,
            state=optuna.trial.TrialState.PRUNED if decisions[-1] else None,
            values=None if decisions[-1] else own[9],
        )
        if prune == "halving" or not decisions[-1]:  # the median is that of finished ones
            rivals.append(own)
    assert 5 < sum(decisions) < len(decisions) - 5


def test_an_unreadable_sweep_does_not_end_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, submission = make(tmp_path, [Point(0, 0, {"x": 0})])
    trial = open_trial(sweep, submission, 0)
    reports = TrialReporter(
        trial.path, trial={"prune": "median", "number": 0, "sweep": str(sweep.path)}, rank=0
    )
    sweep.spec.unlink()
    assert reports.record(1.0, 1) is False
    assert reports.record(2.0, 2) is False
    assert capsys.readouterr().err.count("pruning is off for this trial") == 1
    assert len(trial.reports.read_text().splitlines()) == 2
    reports.close()


def test_the_value_of_the_metric_is_selected() -> None:
    plain, named = (
        TrialReporter(None, trial={}, rank=0),
        TrialReporter(None, trial={"metric": "loss"}, rank=0),
    )
    assert plain.select(1.0, {}) == plain.select(None, {"any": 1.0}) == 1.0
    assert named.select(None, {"loss": 2.0, "accuracy": 1.0}) == 2.0
    with pytest.raises(UsageError, match="metric is 'loss'"):
        named.select(None, {"accuracy": 1.0})
    with pytest.raises(UsageError, match="takes one number"):
        plain.select(None, {})
    assert plain.record(1.0, 1) is False  # no folder: nothing happens
