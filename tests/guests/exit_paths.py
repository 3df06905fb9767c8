"""A guest that ends in one of several ways: exit_paths.py PATH. It knows nothing of Paceline.

Each rank prints a line in an atexit handler and leaves a file open, as scripts do: both must be complete.
"""

from __future__ import annotations

import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """The trainer of the DDP tutorials: it holds the model, and thereby the process group."""

    def __init__(self, wrap=DistributedDataParallel, group=None):
        model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 1))
        self.model = wrap(model) if group is None else wrap(model, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train(self, steps=5):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 20)).sum().backward()
            self.optimizer.step()


def ddp(**store):
    dist.init_process_group("gloo", **store)
    trainer = Trainer()
    trainer.train()
    dist.destroy_process_group()


def two_groups():
    """Two process groups, one after the other. On one port, the faster rank might still reach the first one's store."""
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    for name in ("first", "second"):
        ddp(init_method=f"file://{os.getcwd()}/{name}", **ranks)


def new_group():
    dist.init_process_group("gloo")
    first, second = Trainer(), Trainer(group=dist.new_group())
    first.train()
    second.train()
    dist.destroy_process_group()


def fsdp():
    dist.init_process_group("gloo")
    trainer = Trainer(wrap=fully_shard)
    trainer.train()
    dist.destroy_process_group()


def exception():
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.train()
    raise ValueError("a bug in the script")


def no_destroy():
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.train()


def no_destroy_global():
    """A flat script: the model lives until the interpreter shuts down."""
    global trainer
    dist.init_process_group("gloo")
    trainer = Trainer()
    trainer.train()


def pending():
    """Collectives that nobody waits for are still under way at the end."""
    dist.init_process_group("gloo")
    for _ in range(200):
        dist.all_reduce(torch.ones(1000), async_op=True)


PATHS = (ddp, two_groups, new_group, fsdp, exception, no_destroy, no_destroy_global, pending)

if __name__ == "__main__":
    atexit.register(print, "atexit")
    output = open(f"output-{os.environ['RANK']}", "w")  # noqa: SIM115
    output.write("complete")
    {path.__name__: path for path in PATHS}[sys.argv[1]]()
