"""Train with DeepSpeed's ZeRO. DeepSpeed shards the optimizer and saves; Paceline starts, stops and
requeues.

paceline run --cpu --nproc 2 train.py
paceline submit --nodes 2 --gpus 4 train.py --stage 3

Before a time limit or a preemption, the script gets SIGUSR1. It saves and exits with 75: the job
requeues itself.
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

import deepspeed
import torch
import torch.distributed as dist
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

    def is_agreed(self, device: torch.device) -> bool:
        flag = torch.tensor(float(self.has_arrived), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine) -> float:
    """Return the accuracy. Each rank takes its part of the points."""
    data = spirals(1000, seed=2)
    points, arms = (
        each[dist.get_rank() :: dist.get_world_size()].to(engine.device) for each in data.tensors
    )
    counts = torch.stack(
        [
            (engine(points).argmax(dim=1) == arms).sum(),
            torch.tensor(len(arms), device=engine.device),
        ]
    )
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--stage", type=int, default=2, choices=[0, 1, 2, 3], help="what ZeRO shards (2)"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step and rank (32)")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--cpu", action="store_true", help="use gloo")
    # in the run folder, if Paceline started the ranks
    folder = os.environ.get("PACELINE_CHECKPOINTS", "checkpoints")
    parser.add_argument("--folder", type=Path, default=folder, help="where to save (%(default)s)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> float:
    args = arguments(given)
    stop = StopRequest()
    on_gpu = torch.cuda.is_available() and not args.cpu
    # rank, world size and address from the environment
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    is_first = dist.get_rank() == 0

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untrusted_optimizer": True,  # torch's own, which needs no compiler
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    train_set = spirals(args.samples, seed=1)
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    found, _ = engine.load_checkpoint(str(args.folder))  # the one that the file `latest` names
    if found and is_first:
        print(f"resumed at step {engine.global_steps}", flush=True)

    while engine.global_steps < args.epochs * len(loader):
        epoch, done = divmod(engine.global_steps, len(loader))
        # the order depends on the epoch alone, so the batches that are done can be skipped
        sampler.set_epoch(epoch)
        for points, arms in itertools.islice(loader, done, None):
            loss = F.cross_entropy(engine(points.to(engine.device)), arms.to(engine.device))
            engine.backward(loss)
            engine.step()
            must_stop = stop.is_agreed(engine.device)
            if must_stop or engine.global_steps % len(loader) == 0:
                # on all ranks: each writes its shards, then `latest`
                engine.save_checkpoint(str(args.folder))
            if must_stop:
                dist.destroy_process_group()
                raise SystemExit(START_ME_AGAIN)
        if is_first:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)

    accuracy = evaluate(engine)
    if is_first:
        print(f"final test accuracy: {accuracy:.2%}", flush=True)
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
