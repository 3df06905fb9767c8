"""Points on three spiral arms, and the network that tells the arms apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(count: int, seed: int) -> TensorDataset:
    """Make points on three spiral arms, each labelled with its arm."""
    draw = torch.Generator().manual_seed(seed)
    arms = torch.randint(3, (count,), generator=draw)
    radius = torch.rand(count, generator=draw)
    angle = 5 * radius + arms * 2 * math.pi / 3 + 0.15 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


class ResumableLoader(DataLoader[Any]):
    """Goes on in the middle of an epoch. Lightning saves and loads the state of such a loader with
    its checkpoints.
    """

    batches = 0  # of the epoch, so far

    def __iter__(self) -> Iterator[Any]:
        done = self.batches % len(self)
        for number, batch in enumerate(super().__iter__(), start=1):
            if number > done:
                self.batches = number
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]
