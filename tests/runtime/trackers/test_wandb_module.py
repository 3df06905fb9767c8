"""`paceline.wandb` in place of `wandb`: every function on every rank, with the package, without it, and off."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract import env
from paceline.errors import UsageError
from tests.forked_ranks import Ranks
from tests.runtime.trackers.test_wandb_run import our_lines, run_environment
from tests.runtime.trackers.wandb_runs import unreachable_service, wandb_runs
from tests.runtime.training.test_wrap import quiet


def use_everything() -> dict[str, Any]:
    """Do what existing scripts do; nothing of it may fail on any rank."""
    from paceline import wandb

    given = argparse.Namespace(lr=0.1, width=4)
    run = wandb.init(project="digits", config=given, tags=["a"])
    assert wandb.run is run
    model = torch.nn.Linear(3, 1)
    wandb.watch(model, log="all", log_freq=1)
    wandb.define_metric("loss", summary="min")
    wandb.config.update({"seed": 7}, allow_val_change=True)
    for step in range(3):
        model(torch.ones(3)).sum().backward()
        wandb.log({"loss": 1.0 / (step + 1)}, step=step)
    wandb.log({"table": wandb.Table(columns=["a"], data=[[1]])})
    wandb.summary["done"] = True
    run.summary.update({"more": 1})
    run.log({"direct": 1})
    wandb.unwatch(model)
    wandb.alert(title="loss", text="low")
    wandb.save(f"{run.dir}/nothing-here-*")
    assert Path(run.dir).is_dir()
    with run as same:
        assert same is run
    seen = {
        "lr": wandb.config.lr,
        "seed": wandb.config["seed"],
        "run": type(run).__name__,
        "id": run.id,
    }
    wandb.finish()
    assert wandb.run is None
    return seen


def test_an_existing_script_runs_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    environ = {**run_environment(tmp_path / "run", world_size=2), "WANDB_MODE": "offline"}
    seen = ranks(use_everything, 2, env=environ)
    assert [each["run"] for each in seen] == ["Run", "NoopRun"]
    assert [(each["lr"], each["seed"]) for each in seen] == [(0.1, 7)] * 2
    (wandb_run,) = wandb_runs(tmp_path / "run" / "trackers")
    assert (wandb_run.id, wandb_run.project) == (seen[0]["id"], "digits")
    assert wandb_run.id == "20260102-030405-abcd"
    assert [row["loss"] for row in wandb_run.history if "loss" in row] == [1.0, 0.5, 1 / 3]
    assert wandb_run.config["seed"] == 7
    assert any("gradients" in key for row in wandb_run.history for key in row)
    assert wandb_run.summary["more"] == 1


def use_everything_without(package: str | None) -> tuple[dict[str, Any], str]:
    import contextlib
    import io

    class Blocker:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]
    with contextlib.redirect_stderr(io.StringIO()) as output:
        seen = use_everything()
    if package is None:
        assert "wandb" not in sys.modules
    return seen, output.getvalue()


def test_a_script_without_the_package_runs_with_one_warning(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(
        use_everything_without, 2, "wandb", env=run_environment(tmp_path / "run", world_size=2)
    )
    assert [seen["run"] for seen, _ in results] == ["NoopRun"] * 2
    assert [our_lines(output) for _, output in results] == [
        ["paceline: W&B is disabled: No module named 'wandb' (pip install wandb)"],
        [],
    ]


def test_if_off_it_is_silent_and_never_imported(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(
        use_everything_without,
        2,
        None,
        env=run_environment(tmp_path / "run", wandb=False, world_size=2),
    )
    assert [seen["run"] for seen, _ in results] == ["NoopRun"] * 2
    assert [our_lines(output) for _, output in results] == [[], []]
    assert not (tmp_path / "run" / "trackers").exists()


def begin_again() -> list[str]:
    from paceline import wandb

    first = wandb.init(project="one", group="a")
    wandb.log({"number": 1})
    assert wandb.init(config={"more": 1}) is first
    second = wandb.init(project="two", reinit=True)
    wandb.log({"number": 2})
    wandb.finish(exit_code=3)
    return [first.id, second.id]


def test_a_script_can_have_several_runs(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environ = {**run_environment(folder, world_size=2), "WANDB_MODE": "offline"}
    ids, _ = ranks(begin_again, 2, env=environ)
    first = "20260102-030405-abcd"
    assert ids == [first, f"{first}-2"]
    runs = {wandb_run.id: wandb_run for wandb_run in wandb_runs(folder / "trackers")}
    found = [
        (runs[each].project, runs[each].group, runs[each].history[0]["number"]) for each in ids
    ]
    assert found == [("one", "a", 1), ("two", "warm", 2)]
    assert [runs[each].exit_code for each in ids] == [0, 3]
    assert runs[first].config["more"] == 1


@pytest.mark.slow
def test_the_command_line_sets_project_and_group(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environ = run_environment(
        folder, world_size=1, wandb_project="typed", wandb_group="g", wandb_mode="offline"
    )
    ranks(use_everything, 1, env=environ)
    (wandb_run,) = wandb_runs(folder / "trackers")
    assert (wandb_run.project, wandb_run.group) == ("typed", "g")


def use_module_within_session() -> tuple[str, str, bool]:
    from paceline import wandb

    with quiet() as run:
        mine = wandb.init(project="ignored", config={"width": 8})
        for step in run.steps(range(3)):
            run.log(number=step)
        wandb.finish()  # the session ends it
        run.log(after=1)
        same = run.wandb.id == mine.id
        return mine.id, type(mine).__name__, same


def test_the_script_shares_the_run_of_the_session(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environ = run_environment(folder, wandb=True, wandb_mode="offline", world_size=2)
    first, second = ranks(use_module_within_session, 2, env=environ)
    assert first == ("20260102-030405-abcd", "Run", True)
    assert second[1] == "NoopRun"
    (wandb_run,) = wandb_runs(folder / "trackers")
    assert wandb_run.history[-1]["after"] == 1
    assert wandb_run.config.get("width") == 8


def sweep_in_the_script() -> str:
    from paceline import wandb

    with pytest.raises(UsageError) as raised:
        wandb.agent("me/digits/ab12", print, count=1)
    return raised.value.hint


def test_an_agent_trains_in_one_process_only(ranks: Ranks, tmp_path: Path) -> None:
    hints = ranks(sweep_in_the_script, 2, env=unreachable_service(tmp_path))
    assert all("paceline sweep --wandb-sweep" in hint for hint in hints)


def test_other_ranks_read_the_point_that_an_agent_has_set(tmp_path: Path) -> None:
    """`wandb agent` runs `paceline run`: the point is in a file that the environment names."""
    path = tmp_path / "point.yaml"
    path.write_text("wandb_version: 1\n\nlr:\n  value: 0.25\n")
    code = (
        "from paceline import wandb\nimport json\n"
        "run = wandb.init(config={'lr': 1, 'width': 2})\nprint(json.dumps(dict(run.config)))"
    )
    environ = {
        **unreachable_service(tmp_path),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "WANDB_SWEEP_PARAM_PATH": str(path),
        "PATH": "/usr/bin",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"lr": 0.25, "width": 2}


def test_it_needs_no_torch_and_imports_wandb_only_when_used(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom paceline import wandb\nimport paceline\nassert paceline.wandb is wandb\n"
        "assert not {'torch', 'wandb'} & set(sys.modules), 'imported'\n"
        "run = wandb.init(project='p', mode='offline', dir=sys.argv[1])\nwandb.log({'a': 1})\n"
        "assert wandb.Image is sys.modules['wandb'].Image\nwandb.finish()\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**unreachable_service(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wandb_run,) = wandb_runs(tmp_path)
    assert wandb_run.history[0]["a"] == 1


def test_the_module_is_part_of_the_run_half(tmp_path: Path) -> None:
    from paceline.launch.submission import write_run_half

    write_run_half(tmp_path / "paceline.zip", store=tmp_path)
    code = "from paceline import wandb; print(wandb.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path / "paceline.zip"), env.RUN: ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == f"{tmp_path}/paceline.zip/paceline/wandb.py", done.stderr


def test_a_script_whose_service_is_killed_still_ends(tmp_path: Path) -> None:
    code = (
        "import os, psutil, sys\nfrom paceline import wandb\n"
        "wandb.init(project='p', mode='offline', dir=sys.argv[1])\n"
        "(service,) = psutil.Process().children()\nservice.terminate()\nservice.wait()\n"
        "wandb.log({'a': 1})\nprint('the end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**unreachable_service(tmp_path), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "the end\n"
    assert done.returncode == 0, done.stderr
