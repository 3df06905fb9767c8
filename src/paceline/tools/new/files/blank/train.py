"""A training loop to start from: replace the data, the network and the loss with yours.

python train.py                                 one process
paceline run                                    one rank per GPU, or two on the CPU
paceline submit --nodes 2 --gpus 4              eight ranks on a Slurm cluster
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline


def make_data(count: int, seed: int) -> Dataset:
    """Make up points and a number for each. Put your own dataset here."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (3 * x[:, :1]).sin() + x[:, 1:] ** 2)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@torch.no_grad()
def evaluate(run: paceline.Run, model: nn.Module, data: Dataset) -> float:
    """Return the mean error over the whole dataset. Each rank takes a part of it."""
    model.eval()
    error = count = 0
    for x, y in run.evaluate(data, batch_size=1000):
        error += F.mse_loss(model(x), y, reduction="sum")
        count += len(y)
    model.train()
    return float(run.sum(error) / run.sum(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples per step over all ranks (64)"
    )
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    with paceline.session(seed=0) as run:  # identity, device, process group, signals
        run.config(args)
        train_set, test_set = make_data(4000, seed=1), make_data(1000, seed=2)
        # moved to the device, and wrapped in DDP if there are several ranks
        model = run.wrap(Net(args.width))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        loader = run.loader(train_set, batch_size=args.batch_size)
        # from the newest checkpoint, if there is one
        run.resume(model=model, optimizer=optimizer, loader=loader)
        for epoch in run.epochs(args.epochs):
            for x, y in run.steps(loader):  # saves and stops happen between steps
                with run.autocast():
                    loss = F.mse_loss(model(x), y)
                run.backward(loss)
                run.update(optimizer, clip=1.0)
                run.log(loss=loss)
            error = evaluate(run, model, test_set)
            run.log(error=error)
            run.print(f"epoch {epoch + 1}: test error {error:.4f}")
        run.print(f"final test error: {evaluate(run, model, test_set):.4f}")


if __name__ == "__main__":
    main()
