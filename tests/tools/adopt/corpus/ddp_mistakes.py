"""DDP by hand, with the mistakes that work on one machine."""
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()


def loaders(data):
    return DataLoader(data, batch_size=args.batch_size, sampler=DistributedSampler(data)), DataLoader(data, batch_size=32)


def main():
    import os
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12355'
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    train_loader, test_loader = loaders(TensorDataset(x, x.sum(1, keepdim=True)))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in train_loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            for x, y in test_loader:
                model.module(x)
        torch.save(model.module.state_dict(), f"model-{epoch}.pt")
    print("local rank", args.local_rank)


if __name__ == "__main__":
    main()
