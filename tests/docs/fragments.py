"""Parts of scripts that pages show, and what they need around them to run."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tests.docs.pages import Block

# Blocks that other tests execute, by something in them.
TESTED_ELSEWHERE = {
    # tests/docs/test_python.py
    "sched = torch.optim.lr_scheduler.StepLR(opt, 1000)",
    "critic_opt",
    "weight=(targets",
    "def closure",
    "configurator.py",
    "parallelize=split",
    'torch.device("meta")',
    "class Patience",
    "model.body",
    "Sandbox.up(",  # tests/docs/test_commands.py
    "save_on_exception=True",
    "enable_jit_checkpoint=True",  # tests/examples: lightning, hf_trainer
    "dist.HashStore()",  # tests/guests/test_exit_paths.py
}

CONTEXT = """
import os
import torch
import torch.nn.functional as F
from torch import nn
import paceline

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2))

x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
train = train_set = test_set = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
"""
STARTED = """
run = paceline.start(seed=0, cpu=True, folder="run")
model = run.wrap(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.StepLR(opt, 1000)
loader = run.loader(train_set, batch_size=50)
loss = validation_loss = torch.tensor(1.0)
"""
TOKENS = """
test_set = torch.utils.data.TensorDataset(torch.arange(24).view(6, 4) % 5, torch.arange(24).view(6, 4) % 5)
model = run.wrap(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)))
"""
IMAGES = """
mean, std = 0.5, 0.25
train_set = torch.utils.data.TensorDataset(torch.zeros(1024, 3, 32, 32, dtype=torch.uint8), torch.zeros(1024).long())
"""
BUFFER = """
class Buffer:
    def state_dict(self):
        return {"items": [1]}
    def load_state_dict(self, state):
        assert state == {"items": [1]}
buffer = Buffer()
"""
WEIGHTS = """
from safetensors.torch import save_file
save_file(Net().state_dict(), "model.safetensors")
"""
FOLDER = """
import os
os.environ["PACELINE_DATA"] = "/x"
ImageFolder = str
"""
SHARDS = """
import webdataset as wds
urls, augment = ["a.tar", "b.tar"], None
"""


@dataclass(frozen=True)
class Fragment:
    marker: str  # something that only this block has
    before: str = CONTEXT + STARTED
    after: str = ""
    cpu: bool = False  # whether its own session needs to be told to use the CPU

    def to_script(self, text: str) -> str:
        text = (
            text.replace("paceline.session(", 'paceline.session(cpu=True, folder="run", ')
            if self.cpu
            else text
        )
        return self.before + textwrap.dedent(text) + self.after


FRAGMENTS = (
    Fragment(
        "batch_size=512)   # the GLOBAL batch size",
        CONTEXT.replace("randn(300", "randn(1024"),
        cpu=True,
    ),
    Fragment(
        "loader = run.loader(train, batch_size=512)",
        CONTEXT.replace("randn(300", "randn(1024"),
        cpu=True,
    ),
    Fragment("step = run.capture(step)"),
    Fragment("paceline.transformer_flops(model, layers=12"),
    Fragment("class Totals:"),
    Fragment(
        "while run.step < max_iters:\n    ...",
        CONTEXT + STARTED + "max_iters = 3\n",
        "assert run.step == 3\n",
    ),
    Fragment('per_rank={"buffer": buffer}', CONTEXT + STARTED + BUFFER),
    Fragment("OneCycleLR(opt", CONTEXT + STARTED + "epochs = 2\n"),
    Fragment("run.log(perplexity=", CONTEXT + STARTED + TOKENS),
    Fragment('load_file("model.safetensors")', CONTEXT + WEIGHTS),
    Fragment("paceline.spawn(main)   # one process per GPU", CONTEXT + "if 0: pass\n", ""),
    Fragment("run.scale_lr(opt", CONTEXT.replace("randn(300", "randn(5000") + STARTED),
    Fragment("run.report(loss=validation_loss)"),
    Fragment("from paceline import wandb", "import os\nos.environ['WANDB_MODE'] = 'disabled'\n"),
    Fragment("class Printer:", "", cpu=True),
    Fragment('ImageFolder(os.environ["PACELINE_DATA"]', FOLDER, "assert images == '/x/imagenet'\n"),
    Fragment("wds.WebDataset(urls", CONTEXT + STARTED + SHARDS),
    Fragment(
        "def augment(images, labels, random):",
        CONTEXT + STARTED + IMAGES,
        "next(iter(run.steps(loader)))\n",
    ),
)


def fragment_of(block: Block) -> Fragment | None:
    return next((each for each in FRAGMENTS if each.marker in block.text), None)
