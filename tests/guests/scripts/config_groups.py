"""A script with `key=value` overrides that changes into a folder of its own for each job, as Hydra does."""

import os
import sys
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    out: str = "."
    lr: float = 0.1
    steps: int = 4


def with_config(function):
    @wraps(function)
    def call():
        typed = dict(arg.split("=", 1) for arg in sys.argv[1:])
        unknown = set(typed) - {field.name for field in fields(Config)}
        if unknown:
            sys.exit(f"unknown keys: {', '.join(sorted(unknown))}")
        kinds = {"out": str, "lr": float, "steps": int}
        config = Config(**{name: kinds[name](value) for name, value in typed.items()})
        folder = Path(config.out).absolute() / "outputs" / f"job-{os.environ.get('RANK', '0')}"
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        return function(config)

    return call


@with_config
def main(config):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), config.lr)
    torch.manual_seed(rank)
    for _ in range(config.steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    Path("../..", f"rank-{rank}").write_text(
        f"{dist.get_world_size()} {model.module.weight.sum().item():.9f}"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
