"""Resume a sweep by its name: its original arguments and its file are reused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.contract.sweep_folder import Point, SweepFolder
from tests.sweep.folders import end, grid, make_sweep

pytestmark = pytest.mark.usefixtures("without_torch")

Completed = subprocess.CompletedProcess[str]


def started_from(folder: SweepFolder, file: Path) -> None:
    fields = json.loads(folder.spec.read_text())
    folder.spec.write_text(json.dumps({**fields, "file": str(file)}))


def test_a_sweep_resumes_by_name_in_its_experiment(
    tmp_path: Path, scratch: Path, paceline: Callable[..., Completed]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("")
    (project / "sweep.toml").write_text(
        '[sweep]\nscript = "train.py"\nmetric = "loss"\n[space]\nlr = [1, 2]\n'
    )
    folder = make_sweep(scratch / "project" / "other" / "renamed", grid([{"lr": 1}, {"lr": 2}]))
    started_from(folder, project / "sweep.toml")
    end(folder, 1, "failed")
    completed = paceline(
        "sweep",
        "--local",
        "--cpu",
        "--dry-run",
        "--resubmit",
        "failed",
        "renamed",
        cwd=project,
        check=True,
    )
    assert f"sweep   {folder.path}\n" in completed.stdout
    assert "  1: lr=2" in completed.stdout


def test_a_wandb_sweep_of_a_script_resumes_by_name(
    tmp_path: Path, scratch: Path, paceline: Callable[..., Completed]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("")
    points = [Point(number, number, None) for number in range(4)]
    fields = {"sampler": "wandb", "wandb_sweep": "me/digits/ab12", "parallel": 2}
    folder = make_sweep(scratch / "project" / "default" / "train-ab12", points, **fields)
    started_from(folder, project / "train.py")
    end(folder, 3, "failed")
    args = ("sweep", "--local", "--cpu", "--dry-run")
    completed = paceline(*args, "--resubmit", "failed", "train-ab12", cwd=project, check=True)
    assert f"sweep   {folder.path}\n" in completed.stdout
    assert "trials  1" in completed.stdout
    completed = paceline(*args, "--count", "3", "train-ab12", cwd=project, check=True)
    assert "trials  5" in completed.stdout  # three have never started


def test_without_a_repository_the_project_is_the_current_folder(
    tmp_path: Path, paceline: Callable[..., Completed]
) -> None:
    below = tmp_path / "project" / "examples"
    below.mkdir(parents=True)
    (below / "train.py").write_text("")
    (below / "digits.toml").write_text(
        '[sweep]\nscript = "train.py"\nmetric = "loss"\n[space]\nlr = [1, 2]\n'
    )
    completed = paceline(
        "sweep",
        "--local",
        "--cpu",
        "--dry-run",
        "examples/digits.toml",
        cwd=tmp_path / "project",
        check=True,
    )
    assert f"{Path('project', 'default', 'digits')}\n" in completed.stdout, (
        "as for a run of examples/train.py"
    )


def test_the_original_arguments_are_reused(
    tmp_path: Path, scratch: Path, paceline: Callable[..., Completed]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("raise SystemExit('no')")
    (project / "lines.txt").write_text("--lr 1\n--lr 2\n")
    (project / "drawn.toml").write_text(
        '[sweep]\nscript = "train.py"\nsampler = "random"\n[space]\nlr = { uniform = [0, 1] }\n'
    )
    starts = {
        "lines": ("--script", "train.py", "lines.txt"),
        "drawn": ("--count", "2", "drawn.toml"),
    }
    for name, args in starts.items():
        paceline("sweep", "--local", "--cpu", "--metric", "loss", *args, cwd=project)
        folder = SweepFolder(scratch / "project" / "default" / name)
        assert len(list(folder.trials.glob("*/result.json"))) == 2
        completed = paceline(
            "sweep", "--local", "--dry-run", "--resubmit", "failed", name, cwd=project, check=True
        )
        assert "trials  2" in completed.stdout
        assert folder.read_search().metric == "loss"
    # Lines removed from the list remain trials.
    (project / "train.py").write_text("print('fine')")
    (project / "other.py").write_text("")
    (project / "lines.txt").write_text("--lr 3\n")
    args = ("sweep", "--local", "--cpu", "--script", "other.py", "--resubmit", "failed", "lines")
    paceline(*args, cwd=project, check=True)
    shown = paceline("sweep", "show", "lines", cwd=project, check=True).stdout
    assert "2 done of 2" in shown
    assert "done, without a value\ntrial 0, 1: it ended without a value for loss" in shown
