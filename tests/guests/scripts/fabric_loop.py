"""A training loop with Lightning Fabric."""

import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric

fabric = Fabric(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ.get("GUEST_DEVICES", "2")),
    num_nodes=int(os.environ.get("GUEST_NODES", "1")),
)
fabric.launch()
fabric.seed_everything(0)
plain = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
torch.manual_seed(fabric.global_rank)
for _ in range(4):
    optimizer.zero_grad()
    fabric.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
(Path(sys.argv[1]) / f"rank-{fabric.global_rank}").write_text(
    f"{fabric.world_size} {plain.weight.sum().item():.9f}"
)
