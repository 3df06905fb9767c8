"""Checkpoints of a CUDA model: copies are queued, small tensors are packed, and the state round-trips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.runtime.checkpoint.manager import CheckpointManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterList([nn.Parameter(torch.randn(1 + index % 7, 33)) for index in range(500)])
    model.extend([nn.Parameter(torch.randn(1024, 1024)), nn.Parameter(torch.randn(9, 3).half())])
    model.cuda()
    return model, torch.optim.Adam(model.parameters())


def test_round_trip_on_cuda(tmp_path: Path) -> None:
    """The save doesn't wait for the device, and later steps don't change the file."""
    model, optimizer = build()
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.register(model=model, opt=optimizer)
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        moments = [
            optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()
        ]
        mode = torch.cuda.get_sync_debug_mode()
        if step == 2:  # the first one allocates memory
            torch.cuda.set_sync_debug_mode("error")
        try:
            checkpoints.save(step)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        drawn = torch.rand(3, device="cuda")
        checkpoints.save(step, wait=True)
        assert [saved.error for saved in checkpoints.poll()] == [None]
    other, other_optimizer = build()
    loading = CheckpointManager(tmp_path)
    loading.register(model=other, opt=other_optimizer)
    restored = loading.restore()
    assert restored is not None
    assert restored.step == 2
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    for parameter, weight, moment in zip(other.parameters(), expected, moments, strict=True):
        assert torch.equal(parameter, weight)
        assert torch.equal(other_optimizer.state[parameter]["exp_avg"], moment)
    checkpoints.close()
