"""A script that starts its own processes and has a fixed port, as many repositories do."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, world, out):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", os.environ.get("FIXED_PORT", "12355"))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    while os.environ.get("HOLD") and not Path(os.environ["HOLD"]).exists():  # keep the port
        time.sleep(0.05)
    (Path(out) / f"rank-{rank}").write_text(f"{world} {model.module.weight.sum().item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(os.environ.get("GUEST_WORLD", "2"))
    mp.spawn(worker, args=(world, sys.argv[1]), nprocs=world)
