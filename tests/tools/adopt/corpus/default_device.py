"""A helper with a device as a default argument, and an optimizer that an option chooses."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="A script with options at the top")
parser.add_argument("--opt", default="sgd", choices=["sgd", "adam"])
parser.add_argument("--epochs", type=int, default=2)


def scores(net, x, device=torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    return net(x.to(device))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(80, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True, drop_last=True)
    net = nn.Linear(8, 1)
    if args.opt == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(scores(net, inputs), targets)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
