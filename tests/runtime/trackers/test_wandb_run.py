"""W&B with the real package, offline, with real ranks: one run, the same numbers, and no hang at the end."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.contract import env, wandb_server
from paceline.contract.launch_spec import LaunchSpec
from paceline.contract.run_folder import RunFolder
from tests.forked_ranks import Ranks
from tests.runtime.metrics.test_metrics import lines_of
from tests.runtime.models import data, net
from tests.runtime.trackers.wandb_runs import WandbRun, unreachable_service, wandb_runs
from tests.runtime.training.test_wrap import quiet


def run_environment(folder: Path, **tracking: Any) -> dict[str, str]:
    """Return a rank's variables for a run folder whose launch spec has these tracking settings."""
    folder.mkdir(exist_ok=True)
    launch_spec = LaunchSpec(
        run_id="20260102-030405-abcd",
        program="train.py",
        args=["--token", "hidden"],
        project="digits",
        experiment="warm",
        params={"lr": 0.1, "net": {"width": 4}},
        tracking=tracking,
        nproc=int(tracking.pop("world_size", 4)),
        check=False,
    )
    RunFolder(folder).launch_spec.write_text(launch_spec.to_json())
    RunFolder(folder).run_json.write_text("{}\n")
    return {**unreachable_service(folder.parent), env.RUN: str(folder)}


def train(epochs: int = 2, fail_at: int | None = None, **options: Any) -> list[str]:
    """Train, and return this rank's `run.wandb`."""
    x, y = data(48)
    with quiet(seed=0, save_every_steps=2, best="loss:min", **options) as run:
        run.config({"depth": 2})
        model = run.wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = run.loader(TensorDataset(x, y), batch_size=16)
        run.resume(model=model, optimizer=optimizer, loader=loader)
        for epoch in run.epochs(epochs):
            for a, b in run.steps(loader):
                loss = ((model(a) - b) ** 2).mean()
                run.backward(loss)
                run.update(optimizer)
                run.log(loss=loss, rank=run.rank, phase=f"epoch {epoch}")
                if run.step + 1 == fail_at:
                    raise ValueError("as planned")
            run.log(accuracy=0.5 + epoch / 10)
        live = run.wandb
        live.log({"by hand": 1})
        return [type(live).__name__, live.id]


def assert_same_numbers(wandb_run: WandbRun, lines: list[dict[str, Any]]) -> None:
    mine = [row for row in wandb_run.lines() if "by hand" not in row]
    assert mine == lines
    assert len(lines) > 3


def test_four_ranks_log_one_run_with_the_numbers_of_metrics_jsonl(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    environ = run_environment(folder, wandb_project="paper", wandb_mode="offline")
    results = ranks(train, 4, env=environ)
    assert results == [["Run", "20260102-030405-abcd"]] + [["NoopRun", ""]] * 3
    (wandb_run,) = wandb_runs(folder / "trackers")
    lines = lines_of(folder)
    assert_same_numbers(wandb_run, lines)
    assert {"step", "epoch", "time", "loss", "rank", "phase", "samples_per_second"} <= set(lines[1])
    assert (wandb_run.id, wandb_run.project, wandb_run.group) == (
        "20260102-030405-abcd",
        "paper",
        "warm",
    )
    assert wandb_run.config["lr"] == 0.1
    assert wandb_run.config["net"] == {"width": 4}
    assert wandb_run.config["depth"] == 2
    assert wandb_run.config["paceline"]["world_size"] == 4
    assert "hidden" not in json.dumps(wandb_run.config)
    assert wandb_run.exit_code == 0
    assert wandb_run.summary["loss"] == lines[-1].get("loss", lines[-2].get("loss"))
    assert wandb_run.summary["best/loss"] == min(line["loss"] for line in lines if "loss" in line)
    assert wandb_run.summary["accuracy"] == 0.6
    assert not list((tmp_path / "home").glob(".[!.]*/wandb*"))


def test_all_processes_log_their_own_numbers_in_one_group(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environ = run_environment(
        folder, wandb=True, wandb_all_processes=True, wandb_mode="offline", world_size=2
    )
    results = ranks(train, 2, env=environ)
    names = [f"20260102-030405-abcd-rank-{rank}" for rank in (0, 1)]
    assert results == [["Run", name] for name in names]
    runs = sorted(wandb_runs(folder / "trackers"), key=lambda wandb_run: wandb_run.id)
    assert [wandb_run.id for wandb_run in runs] == [wandb_run.name for wandb_run in runs] == names
    assert {wandb_run.group for wandb_run in runs} == {"20260102-030405-abcd"}
    assert {wandb_run.project for wandb_run in runs} == {"digits"}
    for rank, wandb_run in enumerate(runs):
        assert {row["rank"] for row in wandb_run.history if "rank" in row} == {rank}
    assert {line["rank"] for line in lines_of(folder) if "rank" in line} == {0.5}
    mine, theirs = (
        [row["loss"] for row in wandb_run.history if "loss" in row] for wandb_run in runs
    )
    means = [line["loss"] for line in lines_of(folder) if "loss" in line]
    assert mine != theirs
    assert [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)] == pytest.approx(means)
    assert [wandb_run.exit_code for wandb_run in runs] == [0, 0]


def fail_then_resume() -> list[str]:
    """Run two attempts in one process."""
    with pytest.raises(ValueError, match="as planned"):
        train(fail_at=5)
    os.environ[env.ATTEMPT] = "2"
    time.sleep(1)  # wandb names folders by the second
    return train(epochs=3)


def test_a_resumed_run_keeps_its_id_and_may_repeat_steps(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environ = run_environment(folder, wandb=True, wandb_mode="offline", world_size=1)
    (result,) = ranks(fail_then_resume, 1, env=environ)
    name = "20260102-030405-abcd"
    assert result == ["Run", name]
    first, second = wandb_runs(folder / "trackers")
    assert (first.id, second.id) == (name, name)
    assert (first.exit_code, second.exit_code) == (1, 0)
    lines = lines_of(folder)
    count = len(first.lines())
    assert_same_numbers(first, lines[:count])
    assert_same_numbers(second, lines[count:])
    assert second.history[0]["step"] <= first.history[-1]["step"]  # repeated steps
    assert second.summary["best/loss"] == min(line["loss"] for line in lines if "loss" in line)


# -- no package, key or network ------------------------------------------------------------------------


def train_and_listen(block: str | None = None) -> tuple[list[str], str]:
    """Train without these modules; return what was printed to stderr."""
    import contextlib
    import io
    import sys

    class Blocker:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if block is not None and name.partition(".")[0] == block:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    if block is not None:
        assert block not in sys.modules
        sys.meta_path.insert(0, Blocker())  # type: ignore[arg-type]
    with contextlib.redirect_stderr(io.StringIO()) as output:
        result = train()
    return result, output.getvalue()


def our_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("paceline:")]


def test_without_the_package_training_continues_with_one_warning(
    ranks: Ranks, tmp_path: Path
) -> None:
    environ = run_environment(tmp_path / "run", wandb=True, world_size=2)
    results = ranks(train_and_listen, 2, "wandb", env=environ)
    assert [result for result, _ in results] == [["NoopRun", ""]] * 2
    (line,) = our_lines(results[0][1])
    assert line == (
        "paceline: W&B is disabled: no module named 'wandb' (pip install wandb); metrics.jsonl has all values"
    )
    assert our_lines(results[1][1]) == []
    assert len(lines_of(tmp_path / "run")) > 5


@pytest.mark.parametrize(
    ("has_key", "why"),
    [pytest.param(False, "no API key", marks=pytest.mark.slow), (True, "cannot be reached")],
)
def test_without_a_key_or_a_network_the_run_is_offline(
    ranks: Ranks, tmp_path: Path, has_key: bool, why: str
) -> None:
    folder = tmp_path / "run"
    environ = run_environment(folder, wandb=True, world_size=1)
    if has_key:
        environ["WANDB_API_KEY"] = "k" * 40
    ((result, output),) = ranks(train_and_listen, 1, env=environ)
    assert result[0] == "Run"
    (line,) = our_lines(output)
    assert why in line
    assert "send it later: paceline sync 20260102-030405-abcd" in line
    (wandb_run,) = wandb_runs(folder / "trackers")
    assert_same_numbers(wandb_run, lines_of(folder))


def test_an_unresponsive_dns_server_costs_only_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def never(*args: Any, **options: Any) -> Any:
        waited.append(args)
        time.sleep(20)
        raise OSError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(wandb_server.socket, "create_connection", never)
        patch.setattr(wandb_server, "TIMEOUT", 0.2)
        mode, problem = wandb_server.choose_mode({"WANDB_API_KEY": "k", "HOME": "/nowhere"}, None)
    assert (mode, waited) == ("offline", [(("api.wandb.ai", 443),)])
    assert "did not respond" in problem


@pytest.mark.parametrize(
    ("environ", "requested", "mode"),
    [
        ({"WANDB_MODE": "online"}, None, "online"),  # respected with or without a key
        ({"WANDB_MODE": "disabled"}, "online", "disabled"),
        ({}, "offline", "offline"),
        ({}, None, "offline"),
    ],
)
def test_the_mode_that_the_user_sets_wins(
    environ: dict[str, str], requested: str | None, mode: str
) -> None:
    assert wandb_server.choose_mode({"HOME": "/nowhere", **environ}, requested)[0] == mode


def test_keys_and_addresses_are_found_where_wandb_keeps_them(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert "no API key for api.wandb.ai" in wandb_server.missing_key(environ)
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = http://wandb.example:8080\n")
    assert wandb_server.base_url(environ) == "http://wandb.example:8080"
    (tmp_path / ".netrc").write_text(
        "machine wandb.example:8080\n  login user\n  password secret\n"
    )
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_server.missing_key(environ) == ""
    assert (
        wandb_server._proxy({"https_proxy": "http://p:3128"}, "https", "api.wandb.ai")
        == "http://p:3128"
    )
    assert (
        wandb_server._proxy(
            {"HTTPS_PROXY": "p:1", "no_proxy": ".wandb.ai"}, "https", "api.wandb.ai"
        )
        == ""
    )


# -- the service process -------------------------------------------------------------------------------


def train_and_signal_service(signal_name: str) -> str:
    """Return what was printed."""
    import contextlib
    import io

    import psutil

    from paceline.runtime.trackers import threads

    threads.FINISH_TIMEOUTS["done"] = 4.0
    with contextlib.redirect_stderr(io.StringIO()) as output:
        with quiet() as run:
            for step in run.steps(range(60)):
                run.log(number=step)
                if step == 20:
                    assert run.wandb.id
                    (service,) = psutil.Process().children()
                    service.send_signal(getattr(signal, signal_name))
                time.sleep(0.02)
    with contextlib.suppress(psutil.NoSuchProcess):
        service.kill()
    return output.getvalue()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGSTOP", "paceline: W&B did not finish within 4 s"),
        ("SIGTERM", "paceline: W&B gets no more values"),
    ],
)
def test_training_does_not_depend_on_the_service(
    ranks: Ranks, tmp_path: Path, how: str, said: str
) -> None:
    """A signal to all processes of a job also reaches the service."""
    folder = tmp_path / "run"
    environ = run_environment(folder, wandb=True, wandb_mode="offline", world_size=1)
    (output,) = ranks(train_and_signal_service, 1, how, env=environ)
    (line,) = our_lines(output)
    assert line.startswith(said)
    assert [row["number"] for row in lines_of(folder)] == list(range(60))
