"""The examples of the runtime guide run, and the ported script resumes exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/runtime.md").read_text(encoding="utf-8"), re.M | re.S)

EXAMPLE = """
import torch
Net = lambda: torch.nn.Linear(4, 2)
x = torch.randn(1500, 4, generator=torch.Generator().manual_seed(0))
train_set = test_set = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
"""

# The files that the ported script reads, and a SIGTERM to rank 1 after some steps.
PORT = """
import os, signal, sys
import numpy, torch

os.environ["PACELINE_RUN"] = "{run}"
os.makedirs("{run}", exist_ok=True)
sys.path.insert(0, ".")
numpy.random.default_rng(0).integers(0, 16, 500).astype(numpy.uint16).tofile(f"train.bin.{{os.getpid()}}")
os.replace(f"train.bin.{{os.getpid()}}", "train.bin")

def write(name, text):
    with open(f"{{name}}.{{os.getpid()}}", "w") as file:
        file.write(text)
    os.replace(file.name, name)

write("model.py", "import torch\\nclass GPT(torch.nn.Sequential):\\n    def __init__(self):\\n"
      "        super().__init__(torch.nn.Embedding(16, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 16))\\n")
write("configurator.py", "max_iters, block_size = 400, 8")
entropy, calls = torch.nn.functional.cross_entropy, 0

def cross_entropy(*args):
    global calls
    calls += 1
    if calls == {stop_at} and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    return entropy(*args)

torch.nn.functional.cross_entropy = cross_entropy
"""
RESULT = """
print("ended at", run.step, [weight.double().sum().item().hex() for weight in model.parameters()])
"""


LOSSES = """
import torch
import torch.nn.functional as F
import paceline

PAD = 0
with paceline.session(seed=0, cpu=True) as run:
    model = run.wrap(torch.nn.Linear(4, 3))
    opt = torch.optim.LBFGS(model.parameters())
    x, y, targets = torch.randn(6, 4), torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 0, 2])
    logits = model(x)
"""

RECIPES = """
import torch
import torch.nn.functional as F
import paceline

run = paceline.start(seed=0, cpu=True, folder="run")
"""

GAN = """
generator, critic = run.wrap(torch.nn.Linear(2, 4)), run.wrap(torch.nn.Linear(4, 1))
generator_opt, critic_opt = (torch.optim.SGD(each.parameters(), 0.1) for each in (generator, critic))
for noise, real in run.steps([(torch.randn(3, 2), torch.randn(3, 4)) for _ in range(2)]):
"""

TRAINING = """
Net = lambda: torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
model = run.wrap(Net())
opt = torch.optim.SGD(model.parameters(), 0.1)
loader = [(0, 0)]
evaluate = lambda model: 1.0
"""

META = """
with paceline.session(seed=0, cpu=True) as run:
"""


def port(run: str, stop_at: int = -1) -> str:
    script = next(block for block in BLOCKS if "configurator.py" in block)
    return PORT.format(run=run, stop_at=stop_at) + script + RESULT


@pytest.mark.timeout(300)
def test_the_examples_run_and_the_port_resumes_exactly(tmp_path: Path) -> None:
    mesh = next(block for block in BLOCKS if "parallelize=split" in block).replace("epochs(2)", "epochs(1)")
    meta = next(block for block in BLOCKS if 'torch.device("meta")' in block)
    losses = "".join(block for block in BLOCKS if "weight=(targets" in block or "def closure" in block)
    losses = losses.replace("run.update(opt, clip=", "run.update(torch.optim.SGD(model.parameters(), 0.1), clip=")
    gan, patience, frozen = (
        next(block for block in BLOCKS if text in block) for text in ("critic_opt", "Patience", "model.body")
    )
    scripts = [
        ["gan", 2, RECIPES + GAN + textwrap.indent(gan, "    ")],
        ["patience", 1, RECIPES + TRAINING + patience + "run.print('left in epoch', epoch)"],
        ["frozen", 1, RECIPES + TRAINING + frozen],
        ["losses", 1, LOSSES + textwrap.indent(losses, "    ")],
        ["example", 2, EXAMPLE + BLOCKS[0].replace("seed=0", "seed=0, cpu=True")],
        ["mesh", 4, mesh.replace("seed=0,", "seed=0, cpu=True, folder='run',") + META + textwrap.indent(meta, "    ")],
        ["straight", 2, port("run")],
        ["first", 2, port("../run", stop_at=9)],
        ["second", 2, port("../run")],
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.flat_scripts", str(tmp_path)],
        cwd=ROOT, input=json.dumps(scripts), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = {name: (tmp_path / name / "rank-0.log").read_text() for name, _, _ in scripts}
    assert json.loads(done.stdout) == {name: [0] * count for name, count, _ in scripts}, logs
    assert "2 x 2 ranks, last loss" in logs["mesh"]
    assert "left in epoch 3" in logs["patience"]
    ends = {name: re.findall(r"ended at .*", log) for name, log in logs.items()}
    assert "resumed at step" in logs["second"]
    assert "ended at 400" not in logs["first"]
    assert ends["straight"] == ends["second"] != []
    assert "ended at 400" in logs["straight"]
