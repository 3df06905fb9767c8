"""Plain DDP, without the runtime: this script saves its own checkpoint, stops when it is asked to,
and resumes.

torchrun --nproc-per-node 2 train.py --cpu         as usual
paceline run --cpu --nproc 2 train.py              the same two ranks, with logs and a run folder
paceline submit --nodes 2 --gpus 4 train.py        eight ranks on a Slurm cluster

Before a time limit or a preemption, Paceline sends SIGUSR1. The script then saves and exits with
75, which means "start me again": the job requeues itself.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

START_ME_AGAIN = 75


def spirals(count: int, seed: int) -> TensorDataset:
    """Make points on three spiral arms, each labelled with its arm."""
    draw = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (count,), generator=draw)
    radius = torch.rand(count, generator=draw)
    angle = 3 * radius + arms * 2 * math.pi / 3 + 0.15 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


class StopRequest:
    """The signal does not reach all ranks in the same step. So they ask each other after every
    step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.has_arrived = device, False
        signal.signal(signal.SIGUSR1, self._arrive)

    def _arrive(self, *_: Any) -> None:
        self.has_arrived = True

    def is_agreed(self) -> bool:
        flag = torch.tensor(float(self.has_arrived), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a new file and rename it: whenever the job is killed, there is one whole checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the accuracy. Each rank takes its part of the points."""
    points, arms = (
        each[dist.get_rank() :: dist.get_world_size()].to(device) for each in data.tensors
    )
    counts = torch.stack(
        [(model(points).argmax(dim=1) == arms).sum(), torch.tensor(len(arms), device=device)]
    )
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step and rank (32)")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    # in the run folder, if Paceline started the ranks
    folder = os.environ.get("PACELINE_CHECKPOINTS", "checkpoints")
    parser.add_argument("--folder", type=Path, default=folder, help="where to save (%(default)s)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    stop = StopRequest(device)
    if on_gpu:
        torch.cuda.set_device(device)
    # rank, world size and address come from the environment
    dist.init_process_group("nccl" if on_gpu else "gloo")
    is_first = dist.get_rank() == 0

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    ).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train_set, test_set = spirals(args.samples, seed=1), spirals(1000, seed=2)
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    path, step = args.folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if is_first:
            print(f"resumed at step {step}", flush=True)

    while step < args.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        # the order depends on the epoch alone, so the batches that are done can be skipped
        sampler.set_epoch(epoch)
        for points, arms in itertools.islice(loader, done, None):
            loss = F.cross_entropy(model(points.to(device)), arms.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            must_stop = stop.is_agreed()
            if is_first and (must_stop or step % len(loader) == 0):
                save(
                    path,
                    {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                )
            if must_stop:
                dist.destroy_process_group()
                raise SystemExit(START_ME_AGAIN)
        if is_first:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    accuracy = evaluate(net, test_set, device)
    if is_first:
        print(f"final test accuracy: {accuracy:.2%}", flush=True)
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
