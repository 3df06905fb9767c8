"""Small networks and data that the runtime's tests share."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Has attributes and a method of its own, and a buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 1)])
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[1](torch.tanh(self.layers[0](x)))
        return out.squeeze(1)

    def loss_by_method(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """A loss that does not come by way of `forward`."""
        out = self.layers[1](torch.tanh(self.layers[0](x))).squeeze(1)
        return ((out - y) ** 2).mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def data(samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1).sin()


def weights(*models: nn.Module) -> list[float]:
    """Return all parameters, gathered if sharded, as plain numbers that can be sent between processes."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    numbers: list[float] = torch.cat([each.detach().reshape(-1) for each in whole]).tolist()
    return numbers


def assert_close(found: list[float], expected: list[float], atol: float = 1e-12) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=atol,
    )
