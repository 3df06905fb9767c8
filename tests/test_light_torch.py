"""The torch of most tests' processes: it trains without its compiler and quantization, and loads them on demand."""

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
generator = torch.Generator().manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
opt = torch.optim.AdamW(model.parameters())
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.ones(1, 2)).sum().backward()
opt.step()
dist.destroy_process_group()
"""
IS_LOADED = """
print(*(name in sys.modules for name in ("torch._dynamo.eval_frame", "torch._decomp", "torch.ao.quantization")))
"""
COMPILE = """
double = torch.compile(lambda x: 2 * x, backend="eager")
print(double(torch.ones(1)).item(), torch._inductor.config.deterministic)
print(torch.nn.quantized.Linear.__name__)
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_training_imports_no_compiler_and_no_quantization() -> None:
    assert run(TRAIN + IS_LOADED) == ["False"] * 3, (
        "a new torch uses more of it: see light_torch/sitecustomize.py"
    )


@pytest.mark.slow
def test_they_are_imported_when_they_are_used() -> None:
    """The settings made before are kept."""
    assert run(TRAIN + COMPILE + IS_LOADED) == ["2.0", "True", "Linear", "True", "True", "True"]


META = """
import sys
import torch

indices = torch.zeros(3, dtype=torch.long, device="meta")
try:
    print(len(torch.nn.Embedding(3, 4, device="meta")(indices)))
except NotImplementedError:
    print("not loaded")
import torch.distributed.tensor

print(len(torch.nn.Embedding(3, 4, device="meta")(indices)), "torch._dynamo.eval_frame" in sys.modules)
"""


def test_kernels_of_the_meta_device_come_with_what_computes_on_it() -> None:
    """Who uses the meta device without it gets an error rather than another result."""
    assert run(META) == ["not", "loaded", "3", "False"]
