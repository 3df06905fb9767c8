"""A flat script in the manner of small GPT repositories: settings are globals, and a second file overrides them."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
batch_size = 8
gradient_accumulation_steps = 4
max_iters = 4
learning_rate = 0.1
exec(open("configurator.py").read())  # noqa: SIM115

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world == 0
    gradient_accumulation_steps //= world
else:
    rank, world = 0, 1
torch.manual_seed(1337 + rank)
data = torch.arange(4096) % 61


def get_batch():
    starts = torch.randint(len(data) - 17, (batch_size,))
    return torch.stack([data[i : i + 16] for i in starts]), torch.stack(
        [data[i + 1 : i + 17] for i in starts]
    )


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(61, 16), torch.nn.Linear(16, 61))
torch.manual_seed(1337 + rank)
raw_model = model
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
X, Y = get_batch()
for _ in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = (
            torch.nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten())
            / gradient_accumulation_steps
        )
        X, Y = get_batch()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

with open(os.path.join(out_dir, f"rank-{rank}"), "w") as file:
    file.write(f"{world} {raw_model[1].weight.sum().item():.9f}")
if ddp:
    dist.destroy_process_group()
