"""Steps on a GPU: no synchronization, correct numbers, and helpful errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import LaunchError, NonFinite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def problem() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    x = torch.randn(2048, 64)
    return model, TensorDataset(x, x[:, :10].argmax(1))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def numbers(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("resident", [False, True])
def test_no_step_waits_for_the_device(tmp_path: Path, precision: str, resident: bool) -> None:
    model, dataset = problem()
    expected = []
    with paceline.session(seed=0, precision=precision, folder=tmp_path, report=False) as run:
        model = run.wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = run.loader(dataset, batch_size=64, accumulate=2, resident=resident)
        with no_waiting():
            for _ in run.epochs(20):
                for x, y in run.steps(loader):
                    with run.autocast():
                        loss = nn.functional.cross_entropy(model(x), y)
                    run.backward(loss)
                    run.update(optimizer, clip=1.0)
                    run.log(loss=loss)
                    expected.append(loss.detach().clone())
    by_step = torch.stack(expected).float().cpu().reshape(-1, 2).mean(1).tolist()
    assert numbers(tmp_path, "loss") == pytest.approx(by_step, abs=1e-6)
    assert by_step[-1] < by_step[0] / 3


def test_a_scaler_and_a_checkpoint(tmp_path: Path) -> None:
    def train(max_steps: int) -> tuple[int, list[torch.Tensor], float]:
        model, dataset = problem()
        with paceline.session(
            seed=0, precision="fp16", folder=tmp_path, report=False, max_steps=max_steps
        ) as run:
            model = run.wrap(model)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            loader = run.loader(dataset, batch_size=64)
            run.resume(model=model, optimizer=optimizer, loader=loader)
            began = run.step
            for _ in run.epochs(4):
                for x, y in run.steps(loader):
                    with run.autocast():
                        loss = nn.functional.cross_entropy(model(x), y)
                    run.backward(loss)
                    run.update(optimizer)
        return began, [each.detach().cpu() for each in model.parameters()], loss.item()

    assert train(50)[0] == 0
    began, in_two, loss = train(100)
    assert began == 50
    for each in (tmp_path / "checkpoints").iterdir():
        each.rename(each.with_name(f"moved-{each.name}"))
    _, in_one, _ = train(100)
    assert all(torch.equal(one, two) for one, two in zip(in_one, in_two, strict=True))
    assert loss < 1.5


def test_outputs_of_cuda_graphs_are_logged_unchanged(tmp_path: Path) -> None:
    model, dataset = problem()
    seen = []
    with paceline.session(seed=0, folder=tmp_path, report=False) as run:
        model = run.wrap(model, compile={"mode": "reduce-overhead"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in run.steps(run.loader(dataset, batch_size=256)):
            loss = nn.functional.cross_entropy(model(x), y)
            run.backward(loss)
            run.update(optimizer)
            run.log(loss=loss)
            seen.append(loss.item())
    assert numbers(tmp_path, "loss") == pytest.approx(seen, abs=1e-6)
    assert not any("_orig_mod" in key for key in model.state_dict())


def test_a_bad_loss_is_reported_without_a_sync() -> None:
    def train() -> None:
        model, dataset = problem()
        with paceline.session(report=False) as run:
            model = run.wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for number, (x, _) in enumerate(run.steps(run.loader(dataset, batch_size=64))):
                run.backward(model(x).mean() * (torch.nan if number == 6 else 1.0))
                run.update(optimizer)

    with pytest.raises(NonFinite, match="step 7 on rank 0"):
        train()


def use_a_gpu() -> None:
    with paceline.session(report=False) as run:
        run.sum(torch.ones(1, device=run.device))


@pytest.mark.skipif(
    torch.cuda.device_count() != 1, reason="needs a machine where two ranks must share a GPU"
)
def test_two_ranks_on_one_gpu_are_an_error_before_nccl_hangs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(LaunchError):
        paceline.spawn(use_a_gpu, nproc=2)
    captured: Any = capfd.readouterr()
    assert "Ranks 0 and 1 are on the same GPU" in captured.err
