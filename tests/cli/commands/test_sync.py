"""`paceline sync`: offline runs arrive completely, in order, and once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked_ranks import Ranks
from tests.runtime.metrics.test_metrics import lines_of
from tests.runtime.trackers.test_wandb_run import fail_then_resume, run_environment
from tests.runtime.trackers.wandb_runs import service_environment, unreachable_service
from tests.runtime.trackers.wandb_server import KEY, wandb_service


def test_a_resumed_offline_run_is_uploaded_once_as_one_run(
    ranks: Ranks, tmp_path: Path, scratch: Path, paceline: Callable[..., object]
) -> None:
    folder = tmp_path / "run"
    environ = run_environment(folder, wandb=True, wandb_mode="offline", world_size=1)
    ranks(fail_then_resume, 1, env=environ)
    dry_run = paceline(
        "sync", str(folder), "--dry-run", check=True, **unreachable_service(tmp_path)
    )
    assert dry_run.stdout.count("would send") == 2
    with wandb_service() as service:
        # sync goes online nevertheless
        variables = {**service_environment(service, tmp_path), "WANDB_MODE": "offline"}
        done = paceline("sync", str(folder), check=True, **variables)
        assert done.stdout.count("sent offline-run-") == 2
        assert f"{service.url}/somebody/digits/runs/20260102-030405-abcd" in done.stdout
        (name,) = service.runs
        rows = [
            {key: value for key, value in row.items() if not key.startswith("_")}
            for row in service.runs[name].history()
            if "by hand" not in row
        ]
        assert rows == lines_of(folder)
        assert service.runs[name].exit_code == 0
        operations = len(service.operations)
        again = paceline("sync", str(folder), check=True, **variables)
        assert again.stdout == "run: there is nothing to send to W&B\n"
        assert len(service.operations) == operations


def test_all_runs_of_a_project(
    tmp_path: Path, scratch: Path, paceline: Callable[..., object]
) -> None:
    """Without sending: those of other projects, and what has been sent, are left out."""
    for project, run, sent in [
        ("mine", "1", False),
        ("mine", "2", False),
        ("mine", "3", True),
        ("other", "4", False),
    ]:
        folder = scratch / project / "default" / f"20260101-00000{run}-abcd"
        wandb_run = (
            folder
            / "trackers"
            / "wandb"
            / f"offline-run-20260101_000000-{run}"
            / f"run-{run}.wandb"
        )
        wandb_run.parent.mkdir(parents=True)
        wandb_run.write_bytes(b"x" * 100)
        (folder / "run.json").write_text("{}")
        if sent:
            wandb_run.with_name(f"run-{run}.wandb.synced").touch()
    (tmp_path / "paceline.toml").write_text('[project]\nname = "mine"\n')
    done = paceline("sync", "--all", "--dry-run", check=True, cwd=tmp_path)
    assert [line.rpartition("-")[2] for line in done.stdout.splitlines()] == ["1", "2"]
    refused = paceline("sync", "--all", cwd=tmp_path, **unreachable_service(tmp_path))
    assert refused.returncode == 1
    assert "there is no API key" in refused.stderr
    (tmp_path / "paceline.toml").write_text('[project]\nname = "third"\n')
    assert (
        "0 runs: there is nothing to send"
        in paceline("sync", "--all", check=True, cwd=tmp_path).stdout
    )


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "there is no API key for 127.0.0.1:9"),
        ({"WANDB_API_KEY": KEY}, "127.0.0.1:9 cannot be reached"),
    ],
)
def test_missing_requirements_are_reported(
    tmp_path: Path, paceline: Callable[..., object], variables: dict[str, str], problem: str
) -> None:
    folder = tmp_path / "run"
    run_environment(folder)
    assert (
        "run: there is nothing to send to W&B"
        in paceline("sync", str(folder), check=True, **unreachable_service(tmp_path)).stdout
    )
    wandb_run = (
        folder / "trackers" / "wandb" / "offline-run-20260101_000000-abcd" / "run-abcd.wandb"
    )
    wandb_run.parent.mkdir(parents=True)
    wandb_run.write_bytes(b"x" * 100)
    done = paceline("sync", str(folder), **{**unreachable_service(tmp_path), **variables})
    assert done.returncode == 1
    assert f"Cannot send to W&B: {problem}" in done.stderr


def test_errors_of_wandb_are_quoted(tmp_path: Path, paceline: Callable[..., object]) -> None:
    folder = tmp_path / "run"
    run_environment(folder)
    wandb_run = (
        folder / "trackers" / "wandb" / "offline-run-20260101_000000-abcd" / "run-abcd.wandb"
    )
    wandb_run.parent.mkdir(parents=True)
    wandb_run.write_bytes(b"this is no file of wandb's" * 10)
    with wandb_service() as service:
        done = paceline("sync", str(folder), **service_environment(service, tmp_path))
    assert done.returncode == 1
    assert "wandb did not send offline-run-20260101_000000-abcd" in done.stderr
