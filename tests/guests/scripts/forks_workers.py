"""A script with DataLoader workers, a process pool and a background thread."""

import multiprocessing
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def square(number):
    return number * number


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(square, range(64))
    done = threading.Event()
    ticker = threading.Thread(target=done.wait, args=(60,), daemon=True)
    ticker.start()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    numbers = torch.arange(64.0).unsqueeze(1)
    data = TensorDataset(numbers, torch.tensor(squares, dtype=torch.float32).unsqueeze(1))
    loader = DataLoader(
        data, 8, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    done.set()
    (Path(out) / f"rank-{rank}").write_text(
        f"{dist.get_world_size()} {model.module.weight.sum().item():.6f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
