"""Trackers set by flags and the file, a launched run, and the examples of the documentation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.runtime.metrics.test_metrics import lines_of
from tests.runtime.trackers.wandb_runs import unreachable_service, wandb_runs

PAGE = Path(__file__).parents[3] / "docs" / "trackers.md"
Paceline = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """\
import sys, paceline
with paceline.session(cpu=True) as run:
    for step in run.steps(range(3)):
        run.log(number=step, lr=run.params["lr"])
    if run.rank:
        assert "wandb" not in sys.modules
"""


def test_a_launched_run_logs_and_does_not_write_to_home(
    tmp_path: Path, scratch: Path, paceline: Paceline
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {
        key: value
        for key, value in unreachable_service(tmp_path).items()
        if key != "WANDB_CACHE_DIR"
    }
    args = ("--nproc", "2", "--cpu", "--param", "lr=0.1", "--wandb-project", "p", "--tensorboard")
    done = paceline("run", *args, "train.py", check=True, **variables)
    (folder,) = (path.parent for path in scratch.glob("*/*/*/run.json"))
    (wandb_run,) = wandb_runs(folder / "trackers")
    assert (wandb_run.id, wandb_run.project, wandb_run.config["lr"]) == (folder.name, "p", 0.1)
    assert wandb_run.lines() == lines_of(folder)
    assert done.stderr.count("there is no API key") == 1
    assert len(list((folder / "trackers" / "tensorboard").iterdir())) == 1
    assert list((tmp_path / "home").iterdir()) == []
    paceline("run", "--resume", "last", "--no-wandb", check=True, **variables)
    again = json.loads((folder / "launch.json").read_text())["tracking"]
    assert again == {"wandb": False, "wandb_project": "p", "tensorboard": True}
