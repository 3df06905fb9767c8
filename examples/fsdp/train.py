"""Shard a model over the ranks with FSDP2: each holds a part of the parameters, gradients and
optimizer state.

python train.py                                  one process
paceline run --cpu --nproc 2 train.py            two ranks; each writes its shards of the checkpoint
paceline export last -o model.safetensors        whole tensors again
python train.py --weights model.safetensors      the whole model in plain torch
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def spirals(count: int, seed: int) -> TensorDataset:
    """Make points on three spiral arms, each labelled with its arm."""
    draw = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (count,), generator=draw)
    radius = torch.rand(count, generator=draw)
    angle = 3 * radius + arms * 2 * math.pi / 3 + 0.15 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


class Block(nn.Module):
    """FSDP2 gathers the parameters of one block at a time, and drops them after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def evaluate(run: paceline.Run, model: nn.Module) -> float:
    hits = seen = 0
    for points, arms in run.evaluate(spirals(1000, seed=2), batch_size=200):
        hits += (model(points).argmax(dim=1) == arms).sum()
        seen += len(arms)
    return float(run.sum(hits) / run.sum(seen))


def train(args: argparse.Namespace) -> float:
    with paceline.session(
        seed=0, cpu=args.cpu, precision=args.precision, folder=args.folder
    ) as run:
        # no rank ever holds the whole model: run.wrap initializes block by block
        with torch.device("meta"):
            net = Net()
        total = sum(each.numel() for each in net.parameters())
        # fully_shard on each block, then on the rest
        model = run.wrap(net, mode="fsdp", layers=Block)
        held = (
            sum(each.to_local().numel() for each in model.parameters())
            if run.world_size > 1
            else total
        )
        run.print(f"rank 0 holds {held:,} of {total:,} parameters")
        # after wrap, so that its state is sharded too
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        loader = run.loader(spirals(args.samples, seed=1), batch_size=args.batch_size)
        run.resume(model=model, optimizer=optimizer, loader=loader)
        for epoch in run.epochs(args.epochs):
            for points, arms in run.steps(loader):
                with run.autocast():
                    loss = F.cross_entropy(model(points), arms)
                run.backward(loss)
                run.update(optimizer, clip=1.0)
                run.log(loss=loss)
            run.print(f"epoch {epoch + 1} done")
        accuracy = evaluate(run, model)
        run.print(f"final test accuracy: {accuracy:.2%}")
        return accuracy


def main(given: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description="Tell the arms of a spiral apart, with a sharded model."
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples per step over all ranks (64)"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    parser.add_argument(
        "--folder", type=Path, help="where to save without `paceline run` (nowhere)"
    )
    parser.add_argument(
        "--weights", type=Path, help="evaluate what `paceline export` wrote, instead of training"
    )
    args = parser.parse_args(given)
    if not args.weights:
        return train(args)
    from safetensors.torch import load_file

    net = Net()
    net.load_state_dict(load_file(args.weights))
    points, arms = spirals(1000, seed=2).tensors
    accuracy = float((net(points).argmax(dim=1) == arms).float().mean())
    print(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
