"""Train on a stream of shards that differ in length. Each rank and each of its workers reads its
own shards.

python train.py                                  one process
paceline run --cpu --nproc 2 train.py            two ranks, step by step: stops and resumes exactly,
anywhere paceline run --cpu --nproc 2 train.py --join     two ranks, each to the end of its shards,
with torch's Join
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import paceline

Point = tuple[torch.Tensor, int]


def spirals(count: int, seed: int) -> TensorDataset:
    """Make points on three spiral arms, each labelled with its arm."""
    draw = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (count,), generator=draw)
    radius = torch.rand(count, generator=draw)
    angle = 3 * radius + arms * 2 * math.pi / 3 + 0.15 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def make_shards(folder: Path, count: int) -> list[Path]:
    """Write shards of 100, 200, ... points, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{number}.csv" for number in range(count)]
    for number, path in enumerate(files):
        if not path.exists():
            points = spirals(100 * (number + 1), seed=number)
            text = "".join(f"{x:.4f},{y:.4f},{arm}\n" for (x, y), arm in points)
            path.with_suffix(f".{os.getpid()}").write_text(text, encoding="utf-8")
            path.with_suffix(f".{os.getpid()}").rename(path)
    return files


class Shards(IterableDataset[Point]):
    """The points of this rank's files, which come in another order in each epoch.

    It knows its position: with `state_dict`, a resumed run reads on from there.
    """

    def __init__(self, files: Sequence[Path], *, rank: int, ranks: int) -> None:
        self.files, self.epoch = files[rank::ranks], 0
        self.shard = self.line = 0  # the position: what comes next

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Point]:
        worker = get_worker_info()
        files = self.files[worker.id :: worker.num_workers] if worker else self.files
        order = random.Random(self.epoch).sample(files, len(files))
        while self.shard < len(order):
            lines = order[self.shard].read_text(encoding="utf-8").splitlines()
            while self.line < len(lines):
                x, y, arm = lines[self.line].split(",")
                self.line += 1
                yield torch.tensor([float(x), float(y)]), int(arm)
            self.shard, self.line = self.shard + 1, 0
        self.shard = 0  # where the next epoch begins

    def state_dict(self) -> dict[str, int]:
        return {"shard": self.shard, "line": self.line}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shard, self.line = state["shard"], state["line"]


def train_in_steps(
    run: paceline.Run, model: nn.Module, data: Shards, args: argparse.Namespace
) -> None:
    """All ranks take the same number of steps. One that has no points left repeats its last batch,
    with weight 0.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = run.loader(
        data, batch_size=args.batch_size, sharded=True, drop_last=False, num_workers=args.workers
    )
    run.resume(model=model, optimizer=optimizer, loader=loader)
    for epoch in run.epochs(args.epochs):
        for points, arms in run.steps(loader):
            loss = F.cross_entropy(model(points), arms)
            run.backward(loss)
            run.update(optimizer)
            run.log(loss=loss)
        run.print(f"epoch {epoch + 1} done")


def train_joined(
    run: paceline.Run, model: nn.Module, data: Shards, args: argparse.Namespace
) -> bool:
    """Each rank takes as many steps as it has batches. Return whether training is complete, and was
    not stopped.

    A rank at its end takes part in the all-reduces of the others with zeros, and gets their
    weights. It no longer steps its optimizer, which must be one without state: SGD without
    momentum. Ranks that are at different steps cannot save together, so a step of `run` is an epoch
    here.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(
        data, batch_size=args.batch_size // run.world_size, num_workers=args.workers
    )
    run.resume(model=model, optimizer=optimizer)
    while run.step < args.epochs:
        data.set_epoch(run.step)
        seen = 0
        with run.join(model):
            for points, arms in loader:
                run.backward(F.cross_entropy(model(points.to(run.device)), arms.to(run.device)))
                run.update(optimizer)
                seen += len(arms)
        run.print(f"epoch {run.step + 1} done: {run.gather(seen)} points")
        if run.should_stop:
            return False
    return True


@torch.no_grad()
def evaluate(run: paceline.Run, model: nn.Module) -> float:
    hits = seen = 0
    for points, arms in run.evaluate(spirals(1000, seed=99), batch_size=200):
        hits += (model(points).argmax(dim=1) == arms).sum()
        seen += len(arms)
    return float(run.sum(hits) / run.sum(seen))


def main(given: Sequence[str] | None = None) -> float | None:
    parser = argparse.ArgumentParser(description="Tell the arms of a spiral apart.")
    parser.add_argument(
        "--join", action="store_true", help="let each rank read to the end of its shards"
    )
    parser.add_argument("--shards", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="points per step over all ranks (32)"
    )
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument(
        "--workers", type=int, default=0, help="processes per rank that read shards (0)"
    )
    parser.add_argument("--cpu", action="store_true", help="ignore GPUs")
    parser.add_argument(
        "--folder", type=Path, help="where to save without `paceline run` (nowhere)"
    )
    args = parser.parse_args(given)
    with paceline.session(seed=0, cpu=args.cpu, folder=args.folder) as run:
        with run.rank_zero_first():
            files = make_shards((run.folder or Path("runs")) / "shards", args.shards)
        data = Shards(files, rank=run.rank, ranks=run.world_size)
        net = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
        )
        model = run.wrap(net)
        if args.join and not train_joined(run, model, data, args):
            return None
        if not args.join:
            train_in_steps(run, model, data, args)
        accuracy = evaluate(run, model)
        run.print(f"final test accuracy: {accuracy:.2%}")
        return accuracy


if __name__ == "__main__":
    main()
