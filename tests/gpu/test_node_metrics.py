"""GPUs through the real driver: numbers that can be, for work that is known."""

from __future__ import annotations

import os
import time

import pytest
import torch

from paceline.agent.health.node_metrics import NodeMetrics
from paceline.agent.health.nvml import Gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_a_busy_gpu_is_measured() -> None:
    gpus = Gpus.open(os.environ)
    assert gpus is not None
    assert len(gpus.models) == torch.cuda.device_count()
    assert gpus.models[0]["name"] == torch.cuda.get_device_name(0)
    total = torch.cuda.get_device_properties(0).total_memory
    assert gpus.models[0]["memory"] == pytest.approx(total, rel=0.1)
    metrics = NodeMetrics(lambda: {os.getpid()}, gpus=gpus)
    before = metrics.sample()["gpus"][0]
    held = torch.ones(2**30, dtype=torch.uint8, device="cuda")  # 1 GiB
    matrix = torch.randn(4096, 4096, device="cuda")
    deadline = time.monotonic() + 60
    busiest = 0
    # The driver averages over a second or less: work until it has noticed.
    while busiest < 50 and time.monotonic() < deadline:
        for _ in range(50):
            matrix = torch.tanh(matrix @ matrix)
        torch.cuda.synchronize()
        during = metrics.sample()["gpus"][0]
        busiest = max(busiest, during["busy"])
    assert busiest >= 50
    assert during["memory"] >= before["memory"] + held.numel()
    assert during["memory"] <= gpus.models[0]["memory"]
    assert 20 < during["power"] < 2000
    assert 10 < during["temperature"] < 110
    metrics.close()


def test_hidden_gpus_are_not_reported() -> None:
    assert Gpus.open({"CUDA_VISIBLE_DEVICES": ""}) is None
    one = Gpus.open({"CUDA_VISIBLE_DEVICES": "0"})
    assert one is not None
    assert len(one.sample()) == 1
    one.close()
