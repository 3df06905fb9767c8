"""Train with Horovod, which averages the gradients over ranks started by mpirun. This script does
not use the runtime.

mpirun -np 2 python train.py --cpu
paceline submit --style mpirun --nodes 2 --gpus 4 train.py

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

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
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

    def __init__(self) -> None:
        self.has_arrived = False
        signal.signal(signal.SIGUSR1, self._arrive)

    def _arrive(self, *_: Any) -> None:
        self.has_arrived = True

    def is_agreed(self) -> bool:
        return bool(hvd.allreduce(torch.tensor(float(self.has_arrived)), op=hvd.Sum, name="stop"))


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
def evaluate(model: nn.Module, device: torch.device) -> float:
    """Return the accuracy. Each rank takes its part of the points."""
    points, arms = (
        each[hvd.rank() :: hvd.size()].to(device) for each in spirals(1000, seed=2).tensors
    )
    hits = (model(points).argmax(dim=1) == arms).sum().cpu()
    counts = hvd.allreduce(
        torch.stack([hits, torch.tensor(len(arms))]).double(), op=hvd.Sum, name="accuracy"
    )
    return float(counts[0] / counts[1])


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument("--epochs", type=int, default=5)
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
    stop = StopRequest()
    hvd.init()
    on_gpu = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
    is_first = hvd.rank() == 0

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    ).to(device)
    plain = torch.optim.AdamW(net.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    train_set = spirals(args.samples, seed=1)
    sampler = DistributedSampler(
        train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=0, drop_last=True
    )
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    path, step = args.folder / "checkpoint.pt", 0
    if path.exists():  # every rank reads it, so that there is no state to broadcast
        state = torch.load(path, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if is_first:
            print(f"resumed at step {step}", flush=True)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)

    while step < args.epochs * len(loader):
        epoch, done = divmod(step, len(loader))
        # the order depends on the epoch alone, so the batches that are done can be skipped
        sampler.set_epoch(epoch)
        for points, arms in itertools.islice(loader, done, None):
            loss = F.cross_entropy(net(points.to(device)), arms.to(device))
            optimizer.zero_grad()
            loss.backward()  # starts to average each gradient as soon as it is there
            optimizer.step()  # waits for them
            step += 1
            must_stop = stop.is_agreed()
            if is_first and (must_stop or step % len(loader) == 0):
                save(
                    path,
                    {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                )
            if must_stop:
                hvd.shutdown()
                raise SystemExit(START_ME_AGAIN)
        if is_first:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    accuracy = evaluate(net, device)
    if is_first:
        print(f"final test accuracy: {accuracy:.2%}", flush=True)
    hvd.shutdown()
    return accuracy


if __name__ == "__main__":
    main()
