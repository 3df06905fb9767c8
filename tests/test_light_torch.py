"""The torch of most tests' processes: it trains without its compiler, and compiles when asked to."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import os, sys
import torch
from torch import distributed as dist

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.use_deterministic_algorithms(True)
model = torch.nn.Linear(2, 2)
opt = torch.optim.AdamW(model.parameters())
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.ones(1, 2)).sum().backward()
opt.step()
dist.destroy_process_group()
"""
IS_COMPILER_LOADED = """
print("torch._dynamo.eval_frame" in sys.modules)
"""
COMPILE = """
double = torch.compile(lambda x: 2 * x, backend="eager")
print(double(torch.ones(1)).item(), torch._inductor.config.deterministic)
"""


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_training_does_not_import_the_compiler() -> None:
    assert run(TRAIN + IS_COMPILER_LOADED) == ["False"], "a new torch uses more of it: see light_torch/sitecustomize.py"


@pytest.mark.slow
def test_the_compiler_is_imported_when_it_is_used() -> None:
    """The settings made before are kept."""
    assert run(TRAIN + COMPILE + IS_COMPILER_LOADED) == ["2.0", "True", "True"]
