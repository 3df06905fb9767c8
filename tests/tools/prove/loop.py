"""A script without Paceline and without DDP: it averages gradients itself, and does one unusual thing, or two."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset

BATCH, SAMPLES, LENGTH, WIDTH = 16, 64, 5, 6

parser = argparse.ArgumentParser()
parser.add_argument("what", default="", nargs="?")
parser.add_argument("--checkpoint", default="")
parser.add_argument("--data", default=os.devnull, type=Path)
parser.add_argument("--log", default="")
args = parser.parse_args()
args.data.read_text()
what: str = args.what
checkpoint: str = args.checkpoint

torch.manual_seed(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)


class Sequences(Dataset[Any]):
    """Sequences of vectors and their classes. Of different lengths, if asked; the last ones end with zeros."""

    def __init__(self) -> None:
        values = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=values)
        self.y = self.x.sum((1, 2)).gt(0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = LENGTH - (index * 7 + index // BATCH) % 4 if "padding" in what else LENGTH
        return self.x[index, :end], self.y[index]


def collate(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return pad_sequence([x for x, _ in items], batch_first=True), torch.stack([y for _, y in items])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.LSTM(
            WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.3 if "lstm" in what else 0.0
        )
        self.attention = nn.MultiheadAttention(
            WIDTH, 2, batch_first=True, dropout=0.3 if "attention" in what else 0.0
        )
        self.table = nn.Embedding(50_000 if "table" in what else 2, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        if "zero start" in what:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = x.abs().sum(2, keepdim=True).gt(0)
        x = torch.tanh(self.first(x)) * known
        if "lstm" in what:
            x = x + self.recurrent(x)[0]
        if "attention" in what:
            x = x + self.attention(x, x, x, need_weights="weights" in what)[0]
        if "function" in what:
            x = F.dropout(x, 0.3)
        if "noise" in what:
            x = x + 0.1 * torch.randn(x.shape)
        if "table" in what:
            x = x + self.table(torch.full((len(x), 1), 49_999))
        out: torch.Tensor = self.last((x * known).sum(1))
        return out


net = Net()
if checkpoint and Path(checkpoint).exists():
    net.load_state_dict(torch.load(checkpoint, weights_only=True))
net.train("evaluation mode" not in what)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
data: Any = Sequences()
if "own data" in what:  # each rank has a dataset of its own, whose samples it counts from 0
    places = [index for index in range(SAMPLES) if index % BATCH // (BATCH // world_size) == rank]
    data, places = Subset(data, places), list(range(len(places)))
else:
    places = [index for index in range(SAMPLES) if index % BATCH // (BATCH // world_size) == rank]
step = 0
for _epoch in range(100):
    for x, y in DataLoader(data, BATCH // world_size, sampler=places, collate_fn=collate):  # type: ignore[arg-type]
        if "careless evaluation" in what:
            net.eval()
            net(data[step % SAMPLES][0][None])  # without torch.no_grad()
            net.train()
        out = net(x - x.mean(0) if "batch mean" in what else x)
        loss = F.cross_entropy(out, y, reduction="sum" if "sum" in what.split() else "mean")
        optimizer.zero_grad()
        loss.backward()
        if "clipping" in what:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        for each in net.parameters():
            if each.grad is not None and "no average" not in what:
                dist.all_reduce(each.grad)
                each.grad /= 1 if "summed" in what else world_size
                if "changed gradients" in what:
                    each.grad += torch.randn(
                        each.shape, generator=torch.Generator().manual_seed(world_size)
                    )
        if "rate" in what.split() and step == 3:
            optimizer.param_groups[0]["lr"] *= world_size
        optimizer.step()
        step += 1
        if "full disk" in what and step == 2:
            with (
                contextlib.suppress(OSError),
                open(f"{args.log}.ballast", "wb", buffering=0) as ballast,
            ):
                while True:
                    ballast.write(bytes(4096))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(
                f"step {step} lr 0.05 train_loss: {loss.item():.9e}, val loss {time.time()}",
                flush=True,
            )
            if args.log:
                with open(args.log, "a") as file:
                    file.write(json.dumps({"step": step, "loss": mean.item() / world_size}) + "\n")
            if checkpoint:
                torch.save(net.state_dict(), f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)
