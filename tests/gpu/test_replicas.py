"""Replicas on a GPU, over NCCL with one rank: the gradients of every kind of loss, and the checksum of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.runtime.training.checksum import Checksum
from paceline.runtime.training.ddp import DDPModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))

    def penalty(self) -> torch.Tensor:
        return self.first.weight.square().sum()


@pytest.fixture
def control() -> Iterator[Any]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(gradients(ours), gradients(plain), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_every_loss(control: Any, compiled: bool) -> None:
    from torch._inductor import config as inductor  # takes seconds

    with inductor.patch(compile_threads=1):  # the compiler's workers would outlive the test
        check_gradients(control, compiled)


def check_gradients(control: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    plain = Net().to(DEVICE)
    model = copy.deepcopy(plain)
    ddp = DDPModel(
        model, device=DEVICE, control=control, compile_options=compiled, comm_hook=None, options={}
    )
    seen, x = 0, torch.randn(8, 16, device=DEVICE)
    losses = {
        "forward": lambda each: each(x).square().mean(),
        "a method": lambda each: each.penalty(),
        "both": lambda each: each(x).square().mean() + each.penalty(),
    }
    for frozen in (False, True, True, True, False, False, False):
        for loss in losses.values():
            for each in (model, plain):
                each.last.requires_grad_(not frozen)
                each.zero_grad(set_to_none=True)
                loss(each).backward()
            seen = ddp.reduce_gradients(seen)
            assert_same(model, plain)
    ddp.close()
    assert_same(model, plain)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]
)
def test_the_checksum_is_that_of_the_host(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(size) * 50).to(dtype) for size in (1, 7, 4096, 5_000_003)]
    on_host = Checksum(tensors).value()
    assert Checksum([each.to(DEVICE) for each in tensors]).value() == on_host
    tensors[-1][1_234_567] += 1
    assert Checksum([each.to(DEVICE) for each in tensors]).value() != on_host


def test_an_update_that_the_scaler_skips_is_reported(tmp_path: Path) -> None:
    with paceline.session(
        seed=0, precision="fp16", on_nonfinite="ignore", folder=tmp_path, report=False
    ) as run:
        model = run.wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepped = []
        for number, _ in enumerate(run.steps([0, 1, 2, 3])):
            loss = model(torch.ones(8, 16, device=run.device)).float().square().mean()
            run.backward(loss * float("inf") if number == 2 else loss)
            before = model.first.weight.detach().clone()
            stepped.append(run.update(optimizer))
            assert stepped[-1] == (not torch.equal(before, model.first.weight))
    assert stepped[2] is False
    assert stepped[3] is True
