"""A plain DDP script, without Paceline: it gets the batch size per rank, and prints rank 0's own loss."""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--mistake", default="")
parser.add_argument("--out", default="")
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()

if args.mistake == "fails":
    raise RuntimeError("no such data")
if args.mistake == "logs nothing":
    sys.exit()
torch.manual_seed(1)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
x = torch.randn(160, 6, dtype=torch.float64)
data = TensorDataset(x, (x.sum(1) > 0).long())
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
model = net if args.mistake == "no average" else DistributedDataParallel(net)
opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
sampler = DistributedSampler(data, world_size, rank)
if args.mistake == "same samples":
    sampler = DistributedSampler(data, 1, 0)
loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
step = 0
for epoch in range(100):
    sampler.set_epoch(epoch)
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            if args.out:
                with open(os.path.join(args.out, "numbers.jsonl"), "a") as file:
                    file.write(
                        json.dumps({"step": step, "train_loss": mean.item() / world_size}) + "\n"
                    )
