"""A main that a library calls with its configuration, as Hydra does."""
import functools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {"optim": {"name": "SGD", "lr": 0.1}, "trainer": {"epochs": 3, "batch": 16}}


def configured(function):
    @functools.wraps(function)
    def wrapped():
        return function(CONFIG)
    return wrapped


@configured
def main(cfg):
    torch.manual_seed(0)
    x = torch.randn(80, 8)
    loaders = {
        "train": DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=cfg["trainer"]["batch"], shuffle=True),
        "test": DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=80),
    }
    model = nn.Linear(8, 1)
    optimizer = getattr(torch.optim, cfg["optim"]["name"])(model.parameters(), lr=cfg["optim"]["lr"])
    for epoch in range(cfg["trainer"]["epochs"]):
        for x, y in loaders["train"]:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            error = sum(nn.functional.mse_loss(model(x), y) for x, y in loaders["test"])
        print(f"epoch {epoch}: {float(error):.3f}")
    torch.save(model.state_dict(), "net.pt")


if __name__ == "__main__":
    main()
