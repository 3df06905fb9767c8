"""A script that never destroys its group, sets its module-level state at import, and leaves by the last line."""

import atexit
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(rank)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(8, 4) * (rank + 1)).square().mean().backward()
    optimizer.step()
weights = model.module.weight.detach().clone()
dist.broadcast(weights, 0)
same = torch.equal(weights, model.module.weight)
atexit.register(
    lambda: (Path(sys.argv[1]) / f"rank-{rank}").write_text(f"{dist.get_world_size()} {same}")
)
