"""A script that trains the same on any number of ranks, and, if asked, one with a mistake."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import paceline

BATCH = 16


class Noisy(Dataset[Any]):
    """Adds noise to each sample: from the generators that `run.loader` seeds, or from one of its own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, *, keyed: bool) -> None:
        self.x, self.y, self.keyed, self.own = x, y, keyed, random.Random(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() if self.keyed else self.own.random()
        return self.x[index] + noise, self.y[index]


def make_model(mistake: str, dtype: torch.dtype) -> nn.Module:
    if "instances" in mistake:
        rows = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4))
        return nn.Sequential(*rows, nn.Flatten(), nn.Linear(16, 3)).to(dtype)
    middle = [nn.BatchNorm1d(16)] if "batchnorm" in mistake else []
    end = [nn.Dropout(0.3)] if "dropout" in mistake else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), *end, nn.Linear(16, 3)).to(dtype)


class Stream(IterableDataset[Any]):
    """The same samples in the same order for every process that reads it."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


def make_loader(run: Any, data: Any, mistake: str) -> Any:
    if mistake == "stream on each rank":
        return DataLoader(Stream(data), batch_size=BATCH // run.world_size)
    if mistake == "all data on each rank":
        return DataLoader(data, batch_size=BATCH // run.world_size)
    if mistake == "own shuffle":
        generator = torch.Generator().manual_seed(run.rank)
        return DataLoader(
            data, batch_size=BATCH // run.world_size, shuffle=True, generator=generator
        )
    if mistake == "whole batch on each rank":
        from torch.utils.data.distributed import DistributedSampler

        sampler = DistributedSampler(data, run.world_size, run.rank)
        return DataLoader(data, batch_size=BATCH, sampler=sampler)
    return run.loader(
        data,
        batch_size=BATCH,
        drop_last=mistake != "tail",
        accumulate=2 if mistake == "tail" else 1,
    )


def main(mistake: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator, dtype=dtype)
    y = x[:, :3].argmax(1)
    noisy = mistake in ("keyed augmentation", "augmentation")
    data = Noisy(x, y, keyed=mistake == "keyed augmentation") if noisy else TensorDataset(x, y)
    if mistake == "seed":
        torch.seed()
    with paceline.session(
        seed=None if mistake == "seed" else 3, cpu=True, report=False, progress=False
    ) as run:
        if mistake == "initial weights":
            torch.manual_seed(run.world_size)
        net = make_model(mistake, dtype)
        average = copy.deepcopy(net) if mistake == "lost average" else None
        model = run.wrap(net, **({"mode": "fsdp"} if mistake == "fsdp" else {}))
        rates = {
            "rate": 0.1 * run.world_size,
            "rate in a warm-up": 1e-9 * run.world_size,
            "sum in a warm-up": 1e-9,
        }
        rate = rates.get(mistake, 0.1)
        opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        if mistake.startswith("Adam"):
            opt = torch.optim.Adam(model.parameters(), lr=1e-2)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
        loader = make_loader(run, data, mistake)
        run.resume(model=model, opt=opt, **({} if mistake == "resume" else {"sched": sched}))
        for _ in run.epochs(1 if mistake == "fsdp" else 100):
            for a, b in run.steps(loader):
                loss = F.cross_entropy(
                    model(a), b, reduction="sum" if mistake.split()[0:1] == ["sum"] else "mean"
                )
                if mistake == "weighting":
                    kept = b != 0
                    loss = F.cross_entropy(model(a)[kept], b[kept])
                run.backward(loss)
                if average is not None:
                    for mean, each in zip(average.parameters(), model.parameters(), strict=True):
                        mean.data.lerp_(each.data, 0.1)
                if run.update(opt, clip=0.05 if mistake == "fsdp" else None):
                    sched.step()
                run.log(loss=loss.mean() / (len(b) if mistake == "sum in a warm-up" else 1))


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "",
        torch.float32 if "float32" in sys.argv else torch.float64,
    )
