"""Sweeps of W&B: its file is read, points are asked for by the real package, and no network is found out early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.contract import Order
from paceline.errors import EnvironmentProblem, LaunchError, SpecError, UsageError
from paceline.node.trial import NOTHING_TO_DO, main, open_trial
from paceline.spec.wandb_sweep import load_wandb_file
from paceline.sweep.results import read_sweep
from paceline.sweep.wandb_service import check_name, check_reachable
from paceline.trials import Point
from tests.sweep.folders import make_sweep
from tests.trackers.wandb_server import wandb_service
from tests.trackers.worlds import away, reachable

FILE = """\
program: train.py
method: grid
project: digits
metric: {name: loss, goal: maximize}
command: ["${env}", "python", "${program}", "--epochs", "3", "${args}"]
parameters:
  lr: {values: [0.1, 0.01]}
  width: {values: [32, 64, 128]}
  depth: {value: 2}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.yml"
    path.write_text(text)
    return path


def test_its_file(tmp_path: Path) -> None:
    found = load_wandb_file(written(tmp_path, FILE))
    assert (found.program, found.args, found.arguments) == ("train.py", ("--epochs", "3"), "options")
    assert (found.metric, found.direction, found.points, found.name) == ("loss", "maximize", 6, "sweep")


@pytest.mark.parametrize(
    ("before", "after", "points"),
    [
        ("method: grid", "method: grid\nrun_cap: 4", 4),
        ("method: grid", "method: random\nrun_cap: 9", 9),
        ("method: grid", "method: bayes", None),
        ("{value: 2}", "{min: 1, max: 3}", 18),
        ("{value: 2}", "{min: 0.5, max: 3.0}", None),
        ("{value: 2}", "{parameters: {a: {values: [1, 2]}, b: {value: 1}}}", 12),
    ],
)
def test_how_many_points_it_has(tmp_path: Path, before: str, after: str, points: int | None) -> None:
    assert load_wandb_file(written(tmp_path, FILE.replace(before, after))).points == points


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("program: train.py", "", "there is no 'program'"),
        ("method: grid", "", "there is no 'method'"),
        ("program: train.py", "program: [", "is no YAML"),
        ('"${args}"', '"${args_json}"', r"command has \$\{args_json\}"),
        ('"${program}", ', "", r"command names no \$\{program\}"),
        ("{name: loss, goal: maximize}", "loss", "metric is no table"),
    ],
)
def test_what_is_wrong_in_it_is_named(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_wandb_file(written(tmp_path, FILE.replace(before, after)))
    assert "sweep.yml" in caught.value.message
    assert caught.value.hint


def test_no_network_is_found_before_anything_is_queued(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"http://127\.0\.0\.1:9: 127\.0\.0\.1:9 cannot be reached"):
        check_reachable(away(tmp_path))
    with pytest.raises(EnvironmentProblem, match="WANDB_MODE is 'offline'"):
        check_reachable({**away(tmp_path), "WANDB_MODE": "offline"})
    with wandb_service() as service:
        check_reachable(reachable(service, tmp_path))
        with pytest.raises(EnvironmentProblem, match="no API key"):
            check_reachable({**reachable(service, tmp_path), "WANDB_API_KEY": ""})


def test_names_of_sweeps() -> None:
    assert check_name("me/digits/ab12", "--wandb-sweep") == "me/digits/ab12"
    for wrong in ("", "a/b/c/d", "me//x", "a b"):
        with pytest.raises(UsageError, match="--wandb-sweep is"):
            check_name(wrong, "--wandb-sweep")


def ask(sweep: str, file: Path, environment: dict[str, str]) -> dict[str, object]:
    words = [sys.executable, "-m", "paceline.runtime.trackers.wandb_asking", sweep, str(file)]
    done = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_a_point_is_asked_for_by_the_real_package(tmp_path: Path) -> None:
    with wandb_service([{"lr": 0.1, "name": "a b"}]) as service:
        environment = reachable(service, tmp_path)
        first = ask("somebody/digits/s1", tmp_path / "one.json", environment)
        assert first["point"] == {"lr": 0.1, "name": "a b"}
        variables = first["variables"]
        assert isinstance(variables, dict)
        expected = {
            "WANDB_RUN_ID": "trial-1",
            "WANDB_SWEEP_ID": "s1",
            "WANDB_PROJECT": "digits",
            "WANDB_ENTITY": "somebody",
        }
        assert variables.items() >= expected.items()
        assert Path(variables["WANDB_SWEEP_PARAM_PATH"]).is_file()
        assert service.unanswered == []


def kit(folder: Path) -> Path:
    """What a submission brings along, as far as a trial that opens reads it."""
    folder.mkdir()
    order = Order("", "train.py", [], params={"epochs": 3}, variables={"OMP_NUM_THREADS": "1"})
    (folder / "launch.json").write_text(order.to_json())
    (folder / "run.json").write_text("{}")
    return folder


def test_a_trial_gets_its_point_every_way(tmp_path: Path) -> None:
    points = [Point(number, number, None) for number in range(3)]
    sweep = make_sweep(tmp_path / "sweep", points, sampler="wandb", wandb_sweep="somebody/digits/s1")
    sweep.asked(0).parent.mkdir()
    variables = {"WANDB_RUN_ID": "trial-1", "WANDB_SWEEP_ID": "s1"}
    sweep.asked(0).write_text(json.dumps({"point": {"lr": 0.1, "width": 8}, "variables": variables}))
    trial = open_trial(sweep, kit(tmp_path / "kit"), 0)
    order = Order.from_json(trial.order.read_text())
    assert order.params == {"epochs": 3, "lr": 0.1, "width": 8}
    assert order.args == ["--lr", "0.1", "--width", "8"]
    assert order.variables == {"OMP_NUM_THREADS": "1", **variables}
    sweep.asked(1).write_text('{"point": null}')
    for number in (1, 2):  # the second is not asked for at all
        assert main(["open", str(sweep.path), str(tmp_path / "kit"), str(number)]) == NOTHING_TO_DO
    assert [each.number for each in read_sweep(sweep).trials] == [0]


def test_a_service_that_gives_no_point_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(tmp_path / "sweep", [Point(0, 0, None)], sampler="wandb", wandb_sweep="a/b/c")
    with monkeypatch.context() as patch:
        for name, value in {**away(tmp_path), "WANDB_API_KEY": "short"}.items():
            patch.setenv(name, value)
        with pytest.raises(LaunchError, match=r"the W&B sweep a/b/c gave no point: .*Error") as caught:
            open_trial(sweep, kit(tmp_path / "kit"), 0)
    assert (tmp_path / "sweep" / "asked" / "0.log").name in caught.value.hint


@pytest.mark.slow  # wandb's agent takes ten seconds to believe it
def test_a_sweep_that_has_no_more_points(tmp_path: Path) -> None:
    with wandb_service([]) as service:
        assert ask("somebody/digits/s1", tmp_path / "none.json", reachable(service, tmp_path)) == {
            "point": None
        }
