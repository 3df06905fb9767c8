"""Sweeps of W&B: its file is read, points are asked for by the real package, and no network is found out early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import EnvironmentProblem, SpecError, UsageError
from paceline.spec.wandb_sweep import load_wandb_file
from paceline.sweep.wandb_service import base_url, check_name, check_reachable
from tests.trackers.wandb_server import wandb_service
from tests.trackers.worlds import reachable

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


def test_where_the_service_is(tmp_path: Path) -> None:
    assert base_url({"HOME": str(tmp_path)}) == "https://api.wandb.ai"
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert base_url({"HOME": str(tmp_path)}) == "https://wandb.example.org"
    assert base_url({"HOME": str(tmp_path), "WANDB_BASE_URL": "http://here:1"}) == "http://here:1"


def test_no_network_is_found_before_anything_is_queued() -> None:
    with pytest.raises(EnvironmentProblem, match=r"127\.0\.0\.1:9 cannot be reached from here"):
        check_reachable({"WANDB_BASE_URL": "http://127.0.0.1:9"})
    with pytest.raises(EnvironmentProblem, match="WANDB_MODE is 'offline'"):
        check_reachable({"WANDB_MODE": "offline"})
    with wandb_service() as service:
        check_reachable({"WANDB_BASE_URL": service.url})
        proxied = {"WANDB_BASE_URL": service.url, "HTTP_PROXY": "http://127.0.0.1:9"}
        with pytest.raises(EnvironmentProblem, match=r"through 127\.0\.0\.1:9"):
            check_reachable(proxied)
        check_reachable({**proxied, "NO_PROXY": "localhost, 127.0.0.1"})


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


@pytest.mark.slow  # wandb's agent takes ten seconds to believe it
def test_a_sweep_that_has_no_more_points(tmp_path: Path) -> None:
    with wandb_service([]) as service:
        assert ask("somebody/digits/s1", tmp_path / "none.json", reachable(service, tmp_path)) == {"point": None}
