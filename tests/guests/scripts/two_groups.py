"""Two process groups beside the default one: all ranks over a second gloo group, and one group per rank."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(out):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    second = dist.new_group(backend="gloo")
    alone = [dist.new_group([each]) for each in range(world)][rank]
    torch.manual_seed(0)
    first_model = DDP(torch.nn.Linear(4, 4))
    second_model = DDP(torch.nn.Linear(4, 1), process_group=second)
    optimizer = torch.optim.SGD([*first_model.parameters(), *second_model.parameters()], 0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        second_model(first_model(torch.randn(8, 4))).square().mean().backward()
        optimizer.step()
    own = torch.tensor([float(rank)])
    dist.all_reduce(own, group=alone)
    assert own.item() == rank
    total = second_model.module.weight.sum().item() + first_model.module.weight.sum().item()
    (Path(out) / f"rank-{rank}").write_text(f"{world} {total:.9f}")
    dist.destroy_process_group(second)
    dist.destroy_process_group()


main(sys.argv[1])
