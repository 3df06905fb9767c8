"""W&B sweeps: request points with the real package, report a missing network early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.agent.sweep_trial import NO_POINT_EXIT, close_trial, main, open_trial
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.sweep_folder import Point, SweepFolder
from paceline.errors import EnvironmentProblem, LaunchError, UsageError
from paceline.sweep.results import read_sweep
from paceline.sweep.settings import check_name, check_reachable
from tests.runtime.trackers.wandb_runs import service_environment, unreachable_service
from tests.runtime.trackers.wandb_server import wandb_service
from tests.sweep.folders import make_sweep

Completed = subprocess.CompletedProcess[str]


def test_a_missing_network_is_reported_before_submission(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"http://127\.0\.0\.1:9, but 127\.0\.0\.1:9 cannot be reached"
    ):
        check_reachable(unreachable_service(tmp_path))
    with pytest.raises(EnvironmentProblem, match="WANDB_MODE is 'offline'"):
        check_reachable({**unreachable_service(tmp_path), "WANDB_MODE": "offline"})
    with wandb_service() as service:
        check_reachable(service_environment(service, tmp_path))
        with pytest.raises(EnvironmentProblem, match="no API key"):
            check_reachable({**service_environment(service, tmp_path), "WANDB_API_KEY": ""})


def test_sweep_names_are_validated() -> None:
    check_name("me/digits/ab12")
    for wrong in ("", "a/b/c/d", "me//x", "a b"):
        with pytest.raises(UsageError, match="Invalid W&B sweep"):
            check_name(wrong)


def ask(sweep: str, file: Path, environment: dict[str, str]) -> dict[str, object]:
    args = [sys.executable, "-m", "paceline.runtime.trackers.wandb_points", sweep, str(file)]
    done = subprocess.run(
        args, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(file.read_text())
    return found


def test_the_wandb_package_requests_points(tmp_path: Path) -> None:
    with wandb_service([{"lr": 0.1, "name": "a b"}]) as service:
        environment = service_environment(service, tmp_path)
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


def submission(folder: Path) -> Path:
    """Write the files of a submission that opening a trial reads."""
    folder.mkdir()
    variables = {"OMP_NUM_THREADS": "1"}
    launch_spec = LaunchSpec(
        "", "train.py", [], python=sys.executable, params={"epochs": 3}, variables=variables
    )
    (folder / "launch.json").write_text(launch_spec.to_json())
    (folder / "run.json").write_text("{}")
    return folder


def test_a_trial_receives_its_point_as_arguments_and_params(tmp_path: Path) -> None:
    points = [Point(number, number, None) for number in range(3)]
    sweep = make_sweep(
        tmp_path / "sweep", points, sampler="wandb", wandb_sweep="somebody/digits/s1"
    )
    sweep.chosen_point(0).parent.mkdir()
    variables = {"WANDB_RUN_ID": "trial-1", "WANDB_SWEEP_ID": "s1"}
    sweep.chosen_point(0).write_text(
        json.dumps({"point": {"lr": 0.1, "width": 8}, "variables": variables})
    )
    trial = open_trial(sweep, submission(tmp_path / "submission"), 0)
    launch_spec = LaunchSpec.from_json(trial.launch_spec.read_text())
    assert launch_spec.params == {"epochs": 3, "lr": 0.1, "width": 8}
    assert launch_spec.args == ["--lr", "0.1", "--width", "8"]
    assert launch_spec.variables == {"OMP_NUM_THREADS": "1", **variables}
    sweep.chosen_point(1).write_text('{"point": null}')
    for number in (1, 2):  # the second is not requested at all
        assert (
            main(["open", str(sweep.path), str(tmp_path / "submission"), str(number)])
            == NO_POINT_EXIT
        )
    assert [each.number for each in read_sweep(sweep).trials] == [0]


def test_a_server_without_a_point_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_sweep(
        tmp_path / "sweep", [Point(0, 0, None)], sampler="wandb", wandb_sweep="a/b/c"
    )
    with monkeypatch.context() as patch:
        for name, value in {**unreachable_service(tmp_path), "WANDB_API_KEY": "short"}.items():
            patch.setenv(name, value)
        with pytest.raises(
            LaunchError, match=r"The W&B sweep a/b/c returned no point: .*Error"
        ) as caught:
            open_trial(sweep, submission(tmp_path / "submission"), 0)
    assert (tmp_path / "sweep" / "chosen" / "0.log").name in caught.value.hint
    # as the batch script writes it
    sweep.trial(0).slurm_log.write_text(f"paceline: {caught.value}\n")
    close_trial(sweep, 0, "failed")
    (trial,) = read_sweep(sweep).trials
    assert trial.error.startswith("The W&B sweep a/b/c returned no point: ")


# Every rank reports its arguments and its params.
TRAINING = """
import json, sys
from pathlib import Path
import paceline

with paceline.session() as run:
    report = {"args": sys.argv[1:], "params": dict(run.params)}
    Path(sys.argv[0]).with_name(f"report-{run.rank}.json").write_text(json.dumps(report))
    run.log(loss=run.params["lr"] * 2)
"""


@pytest.mark.slow
def test_all_ranks_train_the_point_of_one_agent(
    tmp_path: Path, paceline: Callable[..., Completed], scratch: Path
) -> None:
    """One process requests a point and both ranks train it; the server records it as a run of the sweep."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(TRAINING)
    (project / "paceline.toml").write_text(
        '[tracking]\nwandb_project = "elsewhere"\n[project]\nsnapshot = false\n'
    )
    with wandb_service([{"lr": 0.1}]) as service:
        completed = paceline(
            "sweep",
            "--local",
            "--cpu",
            "--nproc",
            "2",
            "--parallel",
            "1",
            "--count",
            "1",
            "--metric",
            "loss",
            "--wandb-sweep",
            "somebody/digits/s1",
            "train.py",
            cwd=project,
            timeout=280,
            check=True,
            **service_environment(service, tmp_path),
        )
    assert "best of 1: trial 0, loss 0.2, lr=0.1" in completed.stderr
    for rank in (0, 1):
        report = json.loads((project / f"report-{rank}.json").read_text())
        assert report == {"args": ["--lr", "0.1"], "params": {"lr": 0.1}}
    (run,) = service.runs.values()
    assert (run.name, run.sweep, run.project, run.exit_code) == ("trial-1", "s1", "digits", 0)
    assert run.config["lr"] == {"value": 0.1}
    assert [line["loss"] for line in run.history()] == [0.2]
    (trial,) = read_sweep(SweepFolder(scratch / "project" / "default" / "train-s1")).trials
    assert (trial.state, trial.value, trial.point) == ("done", 0.2, {"lr": 0.1})


def test_the_file_wins_over_the_flag(tmp_path: Path, paceline: Callable[..., Completed]) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sweep.toml").write_text(
        '[sweep]\nscript = "train.py"\nwandb_sweep = "me/digits/filed"\n'
    )
    args = (
        "sweep",
        "--local",
        "--cpu",
        "--count",
        "1",
        "--dry-run",
        "--wandb-sweep",
        "me/digits/typed",
    )
    completed = paceline(*args, "sweep.toml", check=True)
    assert (
        "--wandb-sweep is me/digits/typed, but sweep.toml or its settings name me/digits/filed"
        in completed.stderr
    )
    (tmp_path / "paceline.toml").write_text('[tracking]\nwandb_sweep = "me/digits/tracked"\n')
    completed = paceline(*args, "train.py", check=True)
    assert "or its settings name me/digits/tracked" in completed.stderr
    assert "/train-tracked" in completed.stdout


def test_without_a_network_no_trial_starts(
    tmp_path: Path, paceline: Callable[..., Completed], scratch: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    args = (
        "sweep",
        "--local",
        "--cpu",
        "--count",
        "1",
        "--wandb-sweep",
        "me/digits/ab12",
        "train.py",
    )
    completed = paceline(*args, **unreachable_service(tmp_path))
    assert completed.returncode == 1
    assert "W&B at http://127.0.0.1:9, but 127.0.0.1:9 cannot be reached" in completed.stderr
    assert not scratch.exists()


def test_the_number_of_points_is_required(
    tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    (tmp_path / "train.py").write_text("")
    completed = paceline("sweep", "--wandb-sweep", "me/digits/ab12", "train.py")
    assert completed.returncode == 2
    assert "needs the number of points per agent" in completed.stderr
    (tmp_path / "sweep.yml").write_text("program: train.py")
    for file in ("train.py", "sweep.yml"):
        completed = paceline("sweep", file)
        assert completed.returncode == 2
        assert "--wandb-sweep ENTITY/PROJECT/ID" in completed.stderr


@pytest.mark.slow  # wandb's agent retries for ten seconds
def test_a_sweep_without_remaining_points(tmp_path: Path) -> None:
    with wandb_service([]) as service:
        assert ask(
            "somebody/digits/s1", tmp_path / "none.json", service_environment(service, tmp_path)
        ) == {"point": None}
