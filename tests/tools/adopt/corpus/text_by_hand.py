"""Batches cut from one long tensor, and an optimizer that exists only with an option."""
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--momentum", type=float, default=0.0)
args = parser.parse_args()
tokens = torch.randn(70, 4)
model = nn.Linear(4, 4)
if args.momentum:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=args.momentum)


def train():
    for number, start in enumerate(range(0, tokens.size(0) - 1, 10)):
        model.zero_grad()
        loss = (model(tokens[start : start + 10]) - tokens[start : start + 10]).square().mean()
        loss.backward()
        if args.momentum:
            optimizer.step()
        else:
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)


for epoch in range(2):
    train()
