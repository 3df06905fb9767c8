"""The Python of all pages runs, from one process that imports torch once. The ported script resumes exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest

from tests.docs.fragments import FRAGMENTS, Fragment, fragment_of
from tests.docs.pages import GENERATED, ROOT, Block, blocks, pages

Script = tuple[str, int, str]  # its name, how many ranks run it, and the code
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/runtime.md").read_text(encoding="utf-8"), re.M | re.S
)

EXAMPLE = """
import torch
Net = lambda: torch.nn.Linear(4, 2)
x = torch.randn(1500, 4, generator=torch.Generator().manual_seed(0))
train_set = test_set = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
"""

STEPS = 100  # of the ported script

# The files that the ported script reads, and a SIGTERM to rank 1 after some steps.
PORT = """
import os, signal, sys, time
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
write("configurator.py", "max_iters, block_size = {steps}, 8")
entropy, calls = torch.nn.functional.cross_entropy, 0

def cross_entropy(*args):
    global calls
    calls += 1
    if calls == {stop_at} and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    if {stop_at} > 0:
        time.sleep(0.05)  # ranks agree on a stop every 0.4 s, counted in steps: all of them must be this slow
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
    return PORT.format(run=run, stop_at=stop_at, steps=STEPS) + script + RESULT


def guide_scripts() -> list[Script]:
    mesh = next(block for block in BLOCKS if "parallelize=split" in block).replace(
        "epochs(2)", "epochs(1)"
    )
    meta = next(block for block in BLOCKS if 'torch.device("meta")' in block)
    losses = "".join(
        block for block in BLOCKS if "weight=(targets" in block or "def closure" in block
    )
    losses = losses.replace(
        "run.update(opt, clip=", "run.update(torch.optim.SGD(model.parameters(), 0.1), clip="
    )
    gan, patience, frozen = (
        next(block for block in BLOCKS if text in block)
        for text in ("critic_opt", "Patience", "model.body")
    )
    return [
        ("gan", 2, RECIPES + GAN + textwrap.indent(gan, "    ")),
        ("patience", 1, RECIPES + TRAINING + patience + "run.print('left in epoch', epoch)"),
        ("frozen", 1, RECIPES + TRAINING + frozen),
        ("losses", 1, LOSSES + textwrap.indent(losses, "    ")),
        ("example", 2, EXAMPLE + BLOCKS[0].replace("seed=0", "seed=0, cpu=True")),
        (
            "mesh",
            4,
            mesh.replace("seed=0,", "seed=0, cpu=True, folder='run',")
            + META
            + textwrap.indent(meta, "    "),
        ),
        ("straight", 2, port("run")),
        ("first", 2, port("../run", stop_at=9)),
        ("second", 2, port("../run")),
    ]


def fragments() -> dict[str, tuple[Block, Fragment]]:
    listed = [block for page in pages() if not page.startswith(GENERATED) for block in blocks(page)]
    found = [
        (block, fragment)
        for block in listed
        if block.language == "python" and (fragment := fragment_of(block))
    ]
    return {f"fragment-{FRAGMENTS.index(fragment)}": (block, fragment) for block, fragment in found}


@dataclass(frozen=True)
class Finished:
    codes: dict[str, list[int]]
    logs: dict[str, str]  # of rank 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("scripts")
    scripts = guide_scripts() + [
        (name, 1, part.to_script(block.text)) for name, (block, part) in fragments().items()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.flat_scripts", str(folder), "--quick"],
        cwd=ROOT,
        input=json.dumps(scripts),
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logs = {name: (folder / name / "rank-0.log").read_text() for name, _, _ in scripts}
    return Finished(json.loads(done.stdout), logs)


@pytest.mark.timeout(500)
def test_the_examples_of_the_guide_run(finished: Finished) -> None:
    for name, count, _ in guide_scripts():
        assert finished.codes[name] == [0] * count, finished.logs[name]
    assert "2 x 2 ranks, last loss" in finished.logs["mesh"]
    assert "left in epoch 3" in finished.logs["patience"]


def test_the_ported_script_resumes_exactly(finished: Finished) -> None:
    ends = {
        name: re.findall(r"ended at .*", finished.logs[name])
        for name in ("straight", "first", "second")
    }
    assert "resumed at step" in finished.logs["second"]
    assert f"ended at {STEPS} " not in finished.logs["first"]
    assert ends["straight"] == ends["second"] != []
    assert f"ended at {STEPS} " in finished.logs["straight"]


def test_the_parts_of_scripts_run(finished: Finished) -> None:
    assert {part.marker for _, part in fragments().values()} == {
        part.marker for part in FRAGMENTS
    }, "one is on no page"
    failed = [
        f"{block}:\n{finished.logs[name][-2000:]}"
        for name, (block, _) in fragments().items()
        if finished.codes[name] != [0]
    ]
    assert failed == []
